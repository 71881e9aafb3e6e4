"""Everything an operator's state holds after an epoch, read from the files alone. Used for inspection only."""

from __future__ import annotations

from collections.abc import Iterable

import pyarrow as pa
import pyarrow.compute as pc

from midstream.data.key_space import KeySpace
from midstream.ids import BinId
from midstream.state.files import StateFiles, table_of
from midstream.state.keys import MAX_STORED_KEY, Namespace
from midstream.state.lineage import Lineage
from midstream.state.task import merged

__all__ = ["contents", "dump", "in_namespace", "keys_of", "shown_rows"]


def contents(files: StateFiles, lineage: Lineage, bins: Iterable[BinId] | None = None) -> pa.Table:
    """Stored keys and values, ascending, of some bins or of all of them.

    >>> import tempfile
    >>> contents(StateFiles(tempfile.mkdtemp()), Lineage.start("count")).num_rows
    0
    """
    wanted = set(lineage.bins() if bins is None else bins)
    live_files = [(file, live & wanted) for file, live in lineage.live_files() if live & wanted]
    parts = [(part, live) for file, live in live_files for part in files.read_bins(file, live)]
    rows = merged(parts, files.space) if parts else table_of([], [])
    return rows.filter(pc.is_valid(rows["value"]))


def dump(files: StateFiles, lineage: Lineage, bin_id: BinId) -> dict[bytes, bytes]:
    """Everything that a bin holds, byte for byte: values, views, timers, windows, panes, levels, tables.

    Two dumps are equal exactly if a function with access to everything in the bin cannot tell them apart.
    """
    rows = contents(files, lineage, [bin_id])
    return dict(zip(rows["key"].to_pylist(), rows["value"].to_pylist(), strict=True))


def shown_rows(rows: pa.Table, space: KeySpace) -> pa.Table:
    """The rows with one byte for the bin, whatever the number of bins: nobody looks at it when state is shown."""
    if space.width == 1 or not rows.num_rows:
        return rows
    keys = pc.binary_slice(rows["key"], space.width - 1, MAX_STORED_KEY)
    return rows.set_column(0, rows.schema.field("key"), keys)


def in_namespace(rows: pa.Table, namespace: Namespace) -> pa.Table:
    """Those of :func:`shown_rows` whose keys are in a namespace."""
    if not rows.num_rows:
        return rows
    second = pc.binary_slice(rows["key"], 1, 2)
    return rows.filter(pc.equal(second, pa.scalar(bytes([namespace]), second.type)))


def keys_of(rows: pa.Table) -> pa.Array:
    """The stored keys of some rows, as one array."""
    return rows["key"].combine_chunks().cast(pa.binary())
