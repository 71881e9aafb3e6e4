"""Spark's log of offsets and commits, two small files for each epoch: reading it, and making Spark write it faster.

By default it goes through Hadoop's FileContext, which asks the operating system about symbolic links by starting a
process, several times per file: on a local disk this is 90 ms of every epoch (measured: 59 + 63 ms for the two files
against 13 + 18 ms). Spark's other manager renames files just as atomically there, without that. Hadoop's usual local
file system starts two more processes, to give each file and its checksum permissions (20 + 21 ms against 12 + 11 ms in
another run); the raw one below it does not. Elsewhere, and where the user has chosen a manager, Spark's choice stays.
"""

from __future__ import annotations

import hashlib
import os
import posixpath
import threading
from collections.abc import Iterator
from typing import Any

import msgspec
from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.streaming.readwriter import DataStreamWriter

from midstream.checkpoint.spark_files import SOURCES
from midstream.errors import CheckpointError
from midstream.ids import Epoch
from midstream.runtime.edge import EpochEntry
from midstream.storage import disk
from midstream.storage.blobs import filesystem_of, is_local

MANAGER_CONF = "spark.sql.streaming.checkpointFileManagerClass"
PLAIN_MANAGER = "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"

RAW_FILES = {
    "fs.file.impl": "org.apache.hadoop.fs.RawLocalFileSystem",
    # Otherwise Hadoop would return the file system that it made before, whatever the setting.
    "fs.file.impl.disable.cache": "true",
}
"""For the log alone: a query's session copies them when it starts, so call :func:`forget_settings` there."""

# The session has the setting while a query starts, and several jobs may start at once.
_starting = threading.Lock()


class _BatchMetadata(msgspec.Struct):
    """The second line of a file of the log: the part that is needed here."""

    batchTimestampMs: int


class OffsetLog:
    """Reads the entry that Spark writes for an epoch before it calls us; it does not change until the commit.

    A file has a line with the version, a line with the batch's metadata, and a line for each source.
    """

    def __init__(self, spark_location: str) -> None:
        self.location = spark_location
        self._fs, self._root = filesystem_of(spark_location)
        self._synced: set[str] = set()
        """What sources remember, as far as it is on disk. A driver that died may have left some of it unsynced."""

    def entry(self, epoch: Epoch) -> EpochEntry:
        """The entry of an epoch: when it was planned, and its rows."""
        try:
            with self._fs.open_input_stream(self._path("offsets", epoch)) as stream:
                data = bytes(stream.read())
            _, about, *sources = data.splitlines()
            metadata = msgspec.json.decode(about, type=_BatchMetadata)
        except (OSError, ValueError, msgspec.MsgspecError) as error:
            raise CheckpointError(
                f"Spark's log of offsets in {self.location!r} cannot be read for epoch {epoch}: {error}"
            ) from error
        return EpochEntry(
            1000 * metadata.batchTimestampMs, hashlib.sha256(data).hexdigest(), read=tuple(map(bytes.decode, sources))
        )

    def sync(self, epoch: Epoch) -> None:
        """On a local disk, sync everything that Spark has written up to the beginning of an epoch.

        These are the epoch's offsets, the commit of the previous epoch, and what sources remember: offsets of a file
        source are only the number of an entry there, which names the files.
        """
        if is_local(self._fs):
            unsynced, remembered = disk.Unsynced(), set(self._of_sources())
            for path in (self._path("commits", Epoch(epoch - 1)), self._path("offsets", epoch)):
                if os.path.exists(path):  # the first epoch has no commit before it
                    unsynced.add_file(path)
            for path in sorted(remembered - self._synced):
                unsynced.add_file(path)
                unsynced.add_names(posixpath.join(self._root, SOURCES))
            unsynced.sync()
            self._synced = remembered

    def _of_sources(self) -> Iterator[str]:
        """The files in which sources remember something, on a local disk. Spark writes under hidden names first."""
        if is_local(self._fs):
            for folder, _, names in os.walk(posixpath.join(self._root, SOURCES)):
                yield from (posixpath.join(folder, name) for name in names if not name.startswith("."))

    def _path(self, log: str, epoch: Epoch) -> str:
        return posixpath.join(self._root, log, str(epoch))


def start_query(spark: SparkSession, writer: DataStreamWriter, spark_location: str) -> StreamingQuery:
    """Start a query whose checkpoint is at ``spark_location``; restore the session's settings once it runs."""
    if not spark_location.startswith("file:") or spark.conf.get(MANAGER_CONF, None) is not None:
        return writer.start()
    with _starting:
        is_users = any(spark.conf.get(key, None) is not None for key in RAW_FILES)
        settings = {MANAGER_CONF: PLAIN_MANAGER, **({} if is_users else RAW_FILES)}
        for key, value in settings.items():
            spark.conf.set(key, value)
        try:
            return writer.start()
        except Exception as error:
            if not _lacks_manager(error):
                raise
        finally:
            for key in settings:
                spark.conf.unset(key)
    return writer.start()


def forget_settings(session: SparkSession) -> None:
    """Restore the file settings in a query's own copy of the session; its log has been opened by now."""
    if session.conf.get("fs.file.impl", None) == RAW_FILES["fs.file.impl"]:
        for key in RAW_FILES:
            session.conf.unset(key)


def _lacks_manager(error: Any) -> bool:
    """Whether this version of Spark has the class elsewhere: it is not part of Spark's API."""
    return "ClassNotFoundException" in str(error) and PLAIN_MANAGER.rpartition(".")[2] in str(error)
