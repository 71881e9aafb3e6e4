"""Everything an operator's state holds after an epoch, read from the files alone. Used for inspection only."""

from __future__ import annotations

from collections.abc import Iterable

import pyarrow as pa
import pyarrow.compute as pc

from midstream.ids import BinId
from midstream.state.files import StateFiles, table_of
from midstream.state.keys import Namespace
from midstream.state.lineage import Lineage
from midstream.state.task import merged

__all__ = ["contents", "in_namespace", "keys_of"]


def contents(files: StateFiles, lineage: Lineage, bins: Iterable[BinId] | None = None) -> pa.Table:
    """Stored keys and values, ascending, of some bins or of all of them.

    >>> import tempfile
    >>> contents(StateFiles(tempfile.mkdtemp()), Lineage.start("count")).num_rows
    0
    """
    wanted = set(lineage.bins() if bins is None else bins)
    parts = [(files.read(file), live & wanted) for file, live in lineage.live_files() if live & wanted]
    rows = merged(parts) if parts else table_of([], [])
    return rows.filter(pc.is_valid(rows["value"]))


def in_namespace(rows: pa.Table, namespace: Namespace) -> pa.Table:
    """The rows whose keys are in a namespace."""
    if not rows.num_rows:
        return rows
    second = pc.binary_slice(rows["key"], 1, 2)
    return rows.filter(pc.equal(second, pa.scalar(bytes([namespace]), second.type)))


def keys_of(rows: pa.Table) -> pa.Array:
    """The stored keys of some rows, as one array."""
    return rows["key"].combine_chunks().cast(pa.binary())
