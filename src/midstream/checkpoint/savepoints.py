"""Savepoints: named epochs of a job, with all that a restart from there needs.

A savepoint is one document below ``savepoints/`` in the checkpoint. It holds the epoch's manifest, and names the blobs
of what the job ran then, and of Spark's log. Files of state are named by the manifest. The sweeper leaves all of them
alone for as long as the document is there (:mod:`.sweeper`), so taking a savepoint copies nothing large, and deleting
one removes a single file.
"""

from __future__ import annotations

import posixpath
from collections.abc import Iterator

import msgspec
import pyarrow.fs as pafs

from midstream.checkpoint.manifest import Manifest
from midstream.data.ddl import closest
from midstream.errors import CheckpointError
from midstream.ids import Digest, Epoch
from midstream.state.files import folder_of
from midstream.state.lineage import Lineage
from midstream.storage.blobs import filesystem_of, remove_file, write_atomically
from midstream.storage.checksums import with_checksum, without_checksum
from midstream.storage.documents import read_struct, write_struct

__all__ = ["Savepoint", "Savepoints", "check_savepoint_name"]

LONGEST_NAME = 100
SUFFIX = ".json"


class Savepoint(msgspec.Struct, frozen=True):
    """A committed epoch with a name; see :func:`midstream.take_savepoint`.

    >>> import tempfile
    >>> from midstream import Flow, ListSource, NoopSink, take_savepoint
    >>> from midstream.testing import run_local
    >>> flow, folder = Flow("numbers"), tempfile.mkdtemp()
    >>> flow.source("in", ListSource([[{"n": 1}], [{"n": 2}]], "n int")).sink("out", NoopSink())
    >>> _ = run_local(flow, checkpoint=folder)
    >>> savepoint = take_savepoint(folder, "before tuning", note="all is well")
    >>> savepoint.epoch, savepoint.note
    (1, 'all is well')

    ``is_abandoned``: the job was rewound to an earlier epoch since, so that what it wrote up to here is taken back. A
    fork can still begin here; the job itself cannot come back.
    """

    name: str
    taken_at: float
    by: str
    manifest: Manifest
    blobs: tuple[Digest, ...]
    """What the job ran: its configuration, programs, functions, tables and migrations."""
    spark: dict[str, Digest] = {}
    """Spark's own files, by their names below ``spark/``: blobs with their content."""
    note: str | None = None
    is_abandoned: bool = False
    log: int = 0
    """The number of Spark's log then: another one means that sources have changed since."""

    @property
    def epoch(self) -> Epoch:
        """The epoch after which it stands."""
        return self.manifest.epoch

    def digests(self) -> frozenset[Digest]:
        """All blobs that must stay for it."""
        return frozenset((*self.blobs, *self.spark.values()))

    def state_files(self) -> frozenset[str]:
        """All files of state that must stay for it."""
        lineages = (Lineage.decode(data) for data in self.manifest.lineages.values())
        return frozenset(entry.file.name for lineage in lineages for entry in lineage.entries)


class Savepoints:
    """The savepoints of one checkpoint. One process writes; any may read."""

    def __init__(self, location: str, *, durable: bool = True) -> None:
        self.location = location
        self._durable = durable
        self._fs, self._root = filesystem_of(location)

    def all(self) -> list[Savepoint]:
        """All savepoints, oldest epoch first."""
        return sorted(self._read(), key=lambda each: (each.epoch, each.taken_at, each.name))

    def get(self, name: str) -> Savepoint:
        """The savepoint of this name; raises if there is none."""
        known = {each.name: each for each in self.all()}
        if name not in known:
            near = closest(name, list(known))
            raise CheckpointError(
                f"there is no savepoint {name!r} in {self.location!r}; "
                + (f"there are {_listed(list(known.values()))}" if known else "there are none")
                + (f". Did you mean {near!r}?" if near else "")
            )
        return known[name]

    def require_free(self, name: str) -> None:
        """Refuse a name that is taken."""
        for each in self.all():
            if each.name == name:
                raise CheckpointError(
                    f"there is a savepoint {name!r} already, of epoch {each.epoch}; delete it first, or use another "
                    f"name. There are {_listed(self.all())}"
                )

    def keep(self, savepoint: Savepoint) -> None:
        """Write a savepoint, or replace it. All that it names must be there, and be held until this returns."""
        data = with_checksum(write_struct(savepoint))
        write_atomically(self._fs, self._path(savepoint.name), data, durable=self._durable)

    def delete(self, name: str) -> Savepoint:
        """Delete a savepoint. What only it needs is removed by the sweeper of the job, now or when it starts again."""
        savepoint = self.get(name)
        remove_file(self._fs, self._path(name))
        return savepoint

    def _read(self) -> Iterator[Savepoint]:
        for info in self._fs.get_file_info(pafs.FileSelector(self._root, allow_not_found=True)):
            if not info.path.endswith(SUFFIX):
                continue  # one that was never completed
            try:
                with self._fs.open_input_stream(info.path) as stream:
                    content = without_checksum(bytes(stream.read()))
            except FileNotFoundError:
                continue  # deleted meanwhile
            what = f"the savepoint in {info.path!r}"
            if content is None:
                raise CheckpointError(
                    f"{what} is damaged: its checksum does not match. Restore it from a copy, or remove it; until then "
                    f"nothing is removed from the checkpoint that a savepoint might need"
                )
            yield read_struct(content, Savepoint, what)

    def _path(self, name: str) -> str:
        return posixpath.join(self._root, f"{folder_of(name)}{SUFFIX}")


def check_savepoint_name(name: str) -> None:
    """Refuse names that could be taken for an epoch, or that cannot be given on a command line.

    >>> check_savepoint_name("before tuning")
    >>> check_savepoint_name("7")
    Traceback (most recent call last):
    ...
    midstream.errors.CheckpointError: '7' cannot name a savepoint: it could be the number of an epoch; ...
    """
    why = None
    if not name.strip():
        why = "it is empty"
    elif name != name.strip() or not name.isprintable():
        why = "it begins or ends with a space, or has characters that cannot be printed"
    elif name.isdigit():
        why = "it could be the number of an epoch"
    elif "@" in name or "/" in name:
        why = "'@' stands between a checkpoint and a savepoint, and '/' within a path"
    elif len(name) > LONGEST_NAME:
        why = f"it has {len(name)} characters"
    if why is not None:
        raise CheckpointError(
            f"{name!r} cannot name a savepoint: {why}; use up to {LONGEST_NAME} characters, such as 'before tuning'"
        )


def _listed(savepoints: list[Savepoint]) -> str:
    return ", ".join(f"{each.name!r} (epoch {each.epoch})" for each in savepoints)
