"""Sinks whose rows come back to the driver: a memory sink, and the console."""

from __future__ import annotations

import pyarrow as pa

from midstream.flow.sinks import ConsoleSink, MemorySink, SinkTarget
from midstream.ids import Epoch

__all__ = ["give"]


def give(target: SinkTarget, rows: pa.Table, epoch: Epoch) -> None:
    """Pass an epoch's rows to a sink; they replace those of an earlier run of the epoch."""
    match target:
        case MemorySink():
            target.put(epoch, rows)
        case ConsoleSink(limit):
            shown = rows.slice(0, limit).to_pandas().to_string(index=False) if rows.num_rows else "no rows"
            more = f"\n… more than {limit} rows" if rows.num_rows > limit else ""
            print(f"── epoch {epoch} ──\n{shown}{more}")
        case _:
            raise AssertionError(f"a {type(target).__name__} gets no rows on the driver")
