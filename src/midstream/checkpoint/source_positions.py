"""The positions of sources in the files of Spark's log, and the log of a query with other sources.

Spark knows the sources of a query by their places: an entry of ``offsets`` has a line for each, and ``sources/2`` is
what the third one remembers. A flow knows them by their names. So a query with other sources gets a log of its own: the
entries of the last committed epoch and of the one before it, with the lines in other places. A new source gets the line
of one that has read nothing. The position of a removed source is kept beside the log, under its name, so that the
source continues from there if it comes back.

Pure: from files to files, by their names below the folder of the log.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from urllib.parse import quote, unquote

from midstream.errors import CheckpointError
from midstream.ids import Epoch

__all__ = ["KEPT", "log_with_sources", "require_one_line_each"]

KEPT = "kept"
"""The folder, beside Spark's own, of the positions of sources that were removed."""
NOTHING_READ = b"-"
"""Spark's own line for a source that has read nothing."""
_OFFSET = "offset"
_VERSION = b"v1"
_NO_WATERMARK = b'v1\n{"nextBatchWatermarkMs":0}'


@dataclass(frozen=True)
class _Position:
    """How far a source is read, and the files in which it remembers what it needs for that."""

    offsets: Mapping[str, bytes] = field(default_factory=dict)
    """Its line by name of an entry; the one under an empty name is for all entries that are not listed."""
    files: Mapping[str, bytes] = field(default_factory=dict)

    def line(self, entry: str) -> bytes:
        return self.offsets.get(entry, self.offsets.get("", NOTHING_READ))


def log_with_sources(
    files: Mapping[str, bytes], epoch: Epoch, before: Sequence[str], after: Sequence[str]
) -> dict[str, bytes]:
    """The log of a query with the sources ``after`` that continues after an epoch of the query with those ``before``.

    ``files`` are those from which the earlier query would continue. Both lists are in the order of their queries. Epoch
    -1 means that none is committed.

    >>> log = {"offsets/0": b"v1\\n{}\\n7\\n9", "sources/1/0": b"b's own", "commits/0": b"v1\\n{}"}
    >>> found = log_with_sources(log, Epoch(0), ["a", "b"], ["b", "c"])
    >>> found["offsets/0"], found["sources/0/0"], found["kept/a/offset"]
    (b'v1\\n{}\\n9\\n-', b"b's own", b'7')
    """
    entries = {name: data for name, data in files.items() if name.startswith("offsets/")}
    for name, data in entries.items():
        require_one_line_each(data, before, name)
    positions = {**_kept(files), **_read(files, entries, before)}
    found: dict[str, bytes] = {}
    for name, data in entries.items():
        head = data.splitlines()[:2]
        lines = [positions.get(source, _Position()).line(name) for source in after]
        found[name] = b"\n".join([*head, *lines])
    for name in entries:  # also of an epoch whose commit Spark had not written yet: its manifest is
        commit = name.replace("offsets/", "commits/")
        found[commit] = files.get(commit, _NO_WATERMARK)
    for place, source in enumerate(after):
        for name, data in positions.get(source, _Position()).files.items():
            found[f"sources/{place}/{name}"] = data
    newest = f"offsets/{epoch}"
    for source, position in positions.items():
        if source not in after and position.line(newest) != NOTHING_READ:
            folder = f"{KEPT}/{quote(source, safe='')}"
            found[f"{folder}/{_OFFSET}"] = position.line(newest)
            found |= {f"{folder}/files/{name}": data for name, data in position.files.items()}
    if "metadata" in files:
        found["metadata"] = files["metadata"]
    return found


def require_one_line_each(entry: bytes, sources: Sequence[str], name: str) -> None:
    """Refuse an entry of the log of offsets in which not every source has a line of its own."""
    version, *rest = entry.splitlines()
    if version != _VERSION:
        raise CheckpointError(
            f"Spark's log ({name}) has the format {version.decode(errors='replace')[:20]}, and only "
            f"{_VERSION.decode()} is known, so sources cannot change while the job runs. Was "
            f"spark.sql.streaming.queryEvolution.enableSourceEvolution set?"
        )
    count = len(rest) - 1
    if count != len(sources):
        raise CheckpointError(
            f"Spark's log counts {count} streams ({name}), and the flow has {len(sources)} sources, "
            f"{', '.join(map(repr, sources))}: a DataFrame of one of them unites several streams, or two of them read "
            f"the same. Which position belongs to which source cannot be told, so sources cannot change while the job "
            f"runs; give each stream a source of its own"
        )


def _read(files: Mapping[str, bytes], entries: Mapping[str, bytes], sources: Sequence[str]) -> dict[str, _Position]:
    found = {}
    for place, source in enumerate(sources):
        lines = {name: data.splitlines()[2 + place] for name, data in entries.items()}
        found[source] = _Position(lines, _below(files, f"sources/{place}/"))
    return found


def _kept(files: Mapping[str, bytes]) -> dict[str, _Position]:
    folders = {name.split("/")[1] for name in files if name.startswith(f"{KEPT}/")}
    return {
        unquote(folder): _Position({"": files[f"{KEPT}/{folder}/{_OFFSET}"]}, _below(files, f"{KEPT}/{folder}/files/"))
        for folder in folders
    }


def _below(files: Mapping[str, bytes], folder: str) -> dict[str, bytes]:
    return {name.removeprefix(folder): data for name, data in files.items() if name.startswith(folder)}
