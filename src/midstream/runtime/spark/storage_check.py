"""Checks that Spark can reach the locations of a job. It does so through Hadoop, with its own file systems."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from midstream.checkpoint.location import Checkpoint
from midstream.errors import CheckpointError
from midstream.flow.model import Graph, Sink
from midstream.flow.sinks import FileSink
from midstream.storage.blobs import spark_path

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["hadoop_knows", "require_reachable"]


def require_reachable(graph: Graph, checkpoint: Checkpoint, knows: Callable[[str], bool]) -> None:
    """Refuse a location that we can reach, through pyarrow or fsspec, but Spark cannot.

    Spark's own checkpoint cannot be elsewhere: its offsets and our manifests are useless without each other.
    """
    wanted = {f"the checkpoint {checkpoint.location!r}": checkpoint.spark_location}
    for op in graph.of(Sink):
        target = graph.payloads[op.name]
        if isinstance(target, FileSink):
            wanted[f"the folder {target.path!r} of sink {op.name!r}"] = spark_path(target.path)
    for what, location in wanted.items():
        scheme = urlsplit(location).scheme
        if not knows(scheme):
            raise CheckpointError(
                f"Spark cannot reach {what}: Hadoop has no file system for {scheme!r}. Use a location that Spark "
                f"can reach, or add the Hadoop connector for it to the session (S3 is 's3a' there)"
            )


def hadoop_knows(spark: SparkSession) -> Callable[[str], bool]:
    """A function that asks a session's Hadoop whether it has a file system for a scheme; no store is contacted."""
    from py4j.protocol import Py4JJavaError  # type: ignore[import-untyped]  # it has no annotations

    file_systems = spark.sparkContext._jvm.org.apache.hadoop.fs.FileSystem  # type: ignore[union-attr]
    configuration = spark._jsparkSession.sessionState().newHadoopConf()

    def knows(scheme: str) -> bool:
        try:
            file_systems.getFileSystemClass(scheme, configuration)
        except Py4JJavaError:
            return False
        return True

    return knows
