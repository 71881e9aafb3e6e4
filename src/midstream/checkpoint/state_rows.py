"""What stored keys and values mean, as a table for people."""

from __future__ import annotations

import pyarrow as pa

from midstream.data.schema import columns_of
from midstream.flow.model import Distinct, Operator
from midstream.state.contents import in_namespace, keys_of
from midstream.state.key_arrays import decode_keys
from midstream.state.keys import Namespace


def shown_state(operator: Operator, takes: tuple[pa.Schema, ...], rows: pa.Table) -> pa.Table:
    """What stored keys and values of an operator mean; a distinct shows its keys."""
    if isinstance(operator.spec, Distinct):
        schema = columns_of(takes[0], operator.spec.keys)
        keys = keys_of(in_namespace(rows, Namespace.VALUE))
        return pa.Table.from_arrays(decode_keys(keys, schema), schema=schema)
    return operator.spec.shown_state(operator, takes, rows)
