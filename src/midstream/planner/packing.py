"""Packs what the user handed over (functions and tables) into blobs that workers can load. Shared by both runtimes."""

from __future__ import annotations

import contextlib
from typing import Any

import pyarrow as pa

from midstream.data.lookup_index import LookupIndex
from midstream.data.schema import conform
from midstream.errors import FlowError, FunctionError
from midstream.flow.functions import pack
from midstream.flow.model import Filter, FlatMap, Graph, Lookup, Map, Process, Route, Transact, Transform
from midstream.storage.blobs import Blob


def pack_blobs(graph: Graph) -> dict[str, Blob]:
    """Functions and tables of all operators, ready to store."""
    blobs: dict[str, Blob] = {}
    for op in graph:
        payload = graph.payloads.get(op.name)
        match op.spec:
            case Map() | Filter() | FlatMap() | Route() | Process() | Transact():
                blobs[op.name] = pack(payload, op.name)
            case Lookup() as spec:
                blobs[op.name] = table_to_blob(lookup_table(op.name, spec, payload))
            case Transform():
                # For those who go back to it later. It runs on the driver and may hold DataFrames, which cannot be
                # stored.
                with contextlib.suppress(FunctionError):
                    blobs[op.name] = pack(graph.payloads[op.name][0], op.name)
            case _:
                pass
    return blobs


def lookup_table(name: str, spec: Lookup, payload: Any) -> pa.Table:
    """A lookup's table, collected if it is a DataFrame, and checked for uniqueness if that was promised."""
    table = payload if isinstance(payload, pa.Table) else payload.toArrow()
    table = pa.Table.from_batches([conform(table, spec.table_schema, f"lookup {name!r}, table")])
    if spec.unique:
        on = [theirs for _, theirs in spec.on]
        if (twice := LookupIndex.build(table, on).duplicates()) is not None:
            raise FlowError(
                f"lookup {name!r}: the table has more than one row for {dict(zip(on, twice, strict=True))}, but "
                f"unique=True promises one. Remove the duplicates, or say unique=False to get a row for each match"
            )
    return table


def table_to_blob(table: pa.Table) -> Blob:
    """A lookup table as a blob: one Arrow IPC stream."""
    out = pa.BufferOutputStream()
    with pa.ipc.new_stream(out, table.schema) as writer:
        writer.write_table(table)
    return Blob.of(out.getvalue().to_pybytes())


def table_from_bytes(data: bytes) -> pa.Table:
    """The inverse of :func:`table_to_blob`."""
    return pa.ipc.open_stream(data).read_all()
