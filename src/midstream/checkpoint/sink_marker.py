"""The marker of a file sink's folder, ``_midstream.json``: who owns the folder, and its layout.

Checked before a job starts: a folder with other data, or with another layout, is refused and left untouched.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Mapping

import msgspec
import pyarrow.fs as pafs

from midstream.errors import CheckpointError, FlowError
from midstream.flow.model import Graph, Sink
from midstream.flow.sinks import FileSink
from midstream.storage.blobs import filesystem_of, write_atomically
from midstream.storage.documents import read_struct, write_struct

__all__ = ["MARKER", "SinkMarker", "check_file_sinks", "mark_folders", "owner_of"]

MARKER = "_midstream.json"

_UNFINISHED_MARKER = re.compile(r"_midstream\.json\.\d+\.tmp")


class SinkMarker(msgspec.Struct, frozen=True):
    """The owner and the layout of a sink's folder. Readers of tables skip files whose names begin with ``_``."""

    job: str
    flow: str
    sink: str
    file_format: str = ""
    """Empty for the old layout with a folder ``epoch=N`` for each epoch, which is no longer written."""
    partition_by: tuple[str, ...] = ()


def check_file_sinks(graph: Graph, job: str) -> dict[str, SinkMarker]:
    """Check that every file sink's folder is this job's, in the same layout, or free.

    Returns the markers for the free ones, by path.
    """
    owners: dict[str, str] = {}
    free: dict[str, SinkMarker] = {}
    for op in graph.of(Sink):
        target = graph.payloads[op.name]
        if not isinstance(target, FileSink):
            continue
        _, root = filesystem_of(target.path)
        if root in owners:
            raise FlowError(
                f"the sinks {owners[root]!r} and {op.name!r} both write to {target.path!r}; a folder has one owner"
            )
        owners[root] = op.name
        wanted = SinkMarker(job, graph.name, op.name, target.layout.format, target.partition_by)
        if not _is_marked(target.path, wanted):
            free[target.path] = wanted
    return free


def mark_folders(markers: Mapping[str, SinkMarker]) -> None:
    """Write each folder's marker."""
    for path, marker in markers.items():
        fs, root = filesystem_of(path)
        write_atomically(fs, posixpath.join(root, MARKER), write_struct(marker))


def owner_of(path: str) -> SinkMarker | None:
    """The marker in a folder; None if there is none."""
    fs, root = filesystem_of(path)
    try:
        with fs.open_input_stream(posixpath.join(root, MARKER)) as stream:
            data = stream.read()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return read_struct(data, SinkMarker, f"{MARKER} in the folder {path!r}")


def _is_marked(path: str, wanted: SinkMarker) -> bool:
    what, where = f"sink {wanted.sink!r}", repr(path)
    fs, root = filesystem_of(path)
    info = fs.get_file_info(root)
    if info.type == pafs.FileType.NotFound:
        return False
    if info.type == pafs.FileType.File:
        raise CheckpointError(f"{what}: {where} is a file; a FileSink needs a folder")
    names = (posixpath.basename(entry.path) for entry in fs.get_file_info(pafs.FileSelector(root)))
    # A first start that was killed immediately leaves a marker that was only partly written.
    held = sorted(name for name in names if not _UNFINISHED_MARKER.fullmatch(name))
    if MARKER not in held:
        if held:
            raise CheckpointError(
                f"{what}: the folder {where} holds other data ({', '.join(held[:3])}) that no midstream job wrote; a "
                f"FileSink owns its folder, so use an empty one"
            )
        return False
    with fs.open_input_stream(posixpath.join(root, MARKER)) as stream:
        data = stream.read()
    marker = read_struct(data, SinkMarker, f"{what}: {MARKER} in the folder {where}")
    if (marker.job, marker.sink) != (wanted.job, wanted.sink):
        raise CheckpointError(
            f"{what}: the folder {where} holds the output of sink {marker.sink!r} of flow {marker.flow!r} (job "
            f"{marker.job[:8]}), not of this job ({wanted.job[:8]}). Use another folder; or, to continue that job, "
            f"start with its checkpoint"
        )
    if (marker.file_format, marker.partition_by) != (wanted.file_format, wanted.partition_by):
        raise CheckpointError(
            f"{what}: the folder {where} holds {_layout(marker)}, the sink writes {_layout(wanted)}; readers could not "
            f"read both as one table. Give the sink another folder"
            + (", or the layout that the folder has" if marker.file_format else "; that one stays as it is")
        )
    return True


def _layout(marker: SinkMarker) -> str:
    if not marker.file_format:
        return "a folder epoch=N for each epoch, as an older midstream wrote them"
    folders = f"folders by {', '.join(marker.partition_by)}" if marker.partition_by else "no folders"
    return f"{marker.file_format} files in {folders}"
