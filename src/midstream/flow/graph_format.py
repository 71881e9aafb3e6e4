"""Graphs and operators as documents of a checkpoint.

What a user handed over for an operator (a function, a table) is not part of them: it is stored as a blob of its own.
"""

from __future__ import annotations

import base64
import pickle
from collections.abc import Mapping
from typing import Any, get_args

import pyarrow as pa

from midstream.flow.functions import pack
from midstream.flow.model import Graph, Operator
from midstream.flow.spec import SPECS, Spec
from midstream.flow.transactions.tables import Column, Kind
from midstream.flow.windows import Session, Sliding, Tumbling, Window
from midstream.storage.codec import Codec, DocumentMisfit, float_from_json, float_to_json

__all__ = ["CODEC", "WINDOWS", "graph_from_document", "graph_to_document"]

WINDOWS: Mapping[str, type] = {"tumbling": Tumbling, "sliding": Sliding, "session": Session}
"""The names of windows in documents. They never change, whatever becomes of the classes."""


def _column_to_json(column: Column) -> dict[str, Any]:
    """A column of a table. Only the default of an ``object`` is the user's own, and pickled as functions are."""
    default: Any = column.default
    if column.kind == "double":
        default = float_to_json(default)
    elif column.kind == "object" and default is not None:
        default = base64.b64encode(pack(default, f"the default of a table, column {column.name}").data).decode()
    return {"name": column.name, "kind": column.kind, "default": default}


def _column_from_json(found: Any) -> Column:
    if not isinstance(found, dict) or found.keys() != {"name", "kind", "default"} or type(found["name"]) is not str:
        raise DocumentMisfit(f"{found!r:.80} is not a column of a table: name, kind and default")
    kind, default = found["kind"], found["default"]
    if kind not in get_args(Kind):
        raise DocumentMisfit(f"unknown kind {kind!r} of a table's column; known are {', '.join(get_args(Kind))}")
    if kind == "double":
        default = float_from_json(default)
    elif kind == "object" and default is not None:
        default = pickle.loads(base64.b64decode(default))
    return Column(found["name"], kind, default)


CODEC = Codec({Spec: SPECS, Window: WINDOWS}, {Column: (_column_to_json, _column_from_json)})
"""Writes and reads whatever graphs are made of."""

_OPERATORS = tuple[Operator, ...]
_WRITTEN_FOR = Mapping[str, tuple[pa.Schema, ...]]


def graph_to_document(graph: Graph) -> dict[str, Any]:
    """The fields of a graph's document, without the user's objects; :func:`write_document` makes bytes of them.

    >>> from midstream.flow.model import Source
    >>> graph = Graph("g", (Operator("in", Source(), (), pa.schema([("n", pa.int64())])),))
    >>> [operator] = graph_to_document(graph)["operators"]
    >>> operator["spec"]["kind"], operator["schema"]
    ('source', 'n bigint')
    """
    return {
        "name": graph.name,
        "operators": CODEC.encode(graph.operators, _OPERATORS),
        "written_for": CODEC.encode(graph.written_for, _WRITTEN_FOR),
    }


def graph_from_document(found: Mapping[str, Any], what: str, payloads: Mapping[str, Any] | None = None) -> Graph:
    """The inverse of :func:`graph_to_document`, with the user's objects if they are given.

    ``what`` says what is read, for the :class:`~midstream.errors.CheckpointError` if it cannot be.
    """
    known = {"name": str, "operators": _OPERATORS, "written_for": _WRITTEN_FOR}
    fields = CODEC.decode_fields(found, known, what)
    return Graph(fields["name"], fields["operators"], payloads or {}, fields["written_for"])
