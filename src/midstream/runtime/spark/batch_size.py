"""The number of rows that Spark passes to Python at a time.

Spark can limit its Arrow batches by bytes, and does so by default: it then computes the size of the batch after every
row, which is 40% of the JVM's work for a simple pipeline (measured with Java's flight recorder). So we limit them by
rows instead, and choose the number by the width of rows in previous epochs. The first epoch, of which nothing
is known, is limited by bytes. Wide rows are remembered for a while, because where some came, more may come.

Frames are few and large, so a limit of rows does not suit them. So each frame is followed by *fillers*, rows without a
payload, in proportion to its bytes: with them, a row stands for about the same number of bytes everywhere.
"""

from __future__ import annotations

from dataclasses import dataclass

from pyspark.sql import Column, SparkSession
from pyspark.sql import functions as F

from midstream.engine.frames import FRAME_SCHEMA
from midstream.flow.knobs import knob_value

_HEAD = [name for name in FRAME_SCHEMA.names if name != "payload"]
BATCH_BYTES = knob_value({}, "batch")
MAX_ROWS = 1 << 15
FIRST_ROWS = 10_000
ROWS_CONF = "spark.sql.execution.arrow.maxRecordsPerBatch"
BYTES_CONF = "spark.sql.execution.arrow.maxBytesPerBatch"
NO_LIMIT = (1 << 31) - 1
"""Spark's value for no limit: it then does not compute sizes."""


@dataclass(frozen=True)
class BatchLimit:
    """Most rows of an Arrow batch, and whether Spark must limit bytes as well."""

    rows: int = FIRST_ROWS
    by_bytes: bool = True
    bytes: int = BATCH_BYTES
    """The knob ``batch``."""

    @classmethod
    def of(cls, widest_row: int, nbytes: int = BATCH_BYTES) -> BatchLimit:
        """The limit for rows of at most ``widest_row`` bytes, and ``nbytes`` together.

        >>> BatchLimit.of(40)
        BatchLimit(rows=32768, by_bytes=False, bytes=67108864)
        >>> BatchLimit.of(1_000_000).rows
        67
        """
        return cls(max(1, min(MAX_ROWS, nbytes // max(1, widest_row))), False, nbytes)

    def conf(self) -> dict[str, str]:
        """The settings of Spark for this limit."""
        return {ROWS_CONF: str(self.rows), BYTES_CONF: str(self.bytes if self.by_bytes else NO_LIMIT)}

    def spacing(self) -> list[Column]:
        """The columns of frames, with fillers behind each frame. Not as SQL, which would be parsed in every epoch."""
        count = (F.length("payload") / max(1, self.bytes // self.rows)).cast("int")
        fillers = F.array_repeat(F.lit(None).cast("binary"), count)
        return [*map(F.col, _HEAD), F.explode(F.concat(F.array("payload"), fillers)).alias("payload")]


def widest_of(widest_row: int, before: int) -> int:
    """The width to expect after an epoch with rows of ``widest_row`` bytes.

    Wide rows are forgotten slowly, by half in 22 epochs.

    >>> widest_of(1_000_000, 40), widest_of(40, 1_000_000), widest_of(40, 41)
    (1000000, 968750, 40)
    """
    return max(widest_row, before * 31 // 32)


def is_chosen_by_user(spark: SparkSession) -> bool:
    """Whether the user has configured limits, which we then keep."""
    conf = spark.sparkContext.getConf()
    return conf.contains(ROWS_CONF) or conf.contains(BYTES_CONF)
