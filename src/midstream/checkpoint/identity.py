"""The owner of a checkpoint: its identity, and the checks before a flow uses the folder."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Collection

import pyarrow.fs as pafs

from midstream.checkpoint.manifest import Identity
from midstream.data.key_space import check_bins
from midstream.errors import CheckpointError, FlowError
from midstream.storage.documents import read_struct, unreadable

__all__ = ["IDENTITY", "REWIND", "read_identity", "require_empty", "require_same", "require_settled"]

IDENTITY = "midstream.json"
REWIND = "rewind.json"

_UNFINISHED_IDENTITY = re.compile(r"midstream\.json\.\d+\.tmp")


def read_identity(fs: pafs.FileSystem, path: str, location: str) -> Identity | None:
    """The identity in a checkpoint, or None if there is none."""
    if fs.get_file_info(path).type == pafs.FileType.NotFound:
        return None
    with fs.open_input_stream(path) as stream:
        data = stream.read()
    what = f"the checkpoint {location!r} (midstream.json)"
    identity = read_struct(data, Identity, what)
    try:
        check_bins(identity.bins)
    except FlowError as error:
        raise unreadable(what, str(error)) from error
    return identity


def require_empty(fs: pafs.FileSystem, root: str, location: str) -> None:
    """Refuse a new checkpoint in a folder that holds anything else."""
    info = fs.get_file_info(root)
    if info.type == pafs.FileType.File:
        raise CheckpointError(f"the checkpoint {location!r} is a file; it must be a folder")
    if info.type == pafs.FileType.NotFound:
        return
    names = {posixpath.basename(entry.path) for entry in fs.get_file_info(pafs.FileSelector(root))}
    # A first start that was killed immediately leaves the lock, and an identity that was only partly written.
    held = sorted(name for name in names if name != "lock" and not _UNFINISHED_IDENTITY.fullmatch(name))
    if held:
        raise CheckpointError(
            f"the checkpoint {location!r} holds other things ({', '.join(held[:5])}{', …' if len(held) > 5 else ''}) "
            f"and no midstream.json; use an empty folder, or the checkpoint of this flow"
        )


def require_settled(fs: pafs.FileSystem, root: str, location: str) -> None:
    """Refuse a checkpoint with a rewind under way."""
    if fs.get_file_info(posixpath.join(root, REWIND)).type != pafs.FileType.NotFound:
        raise CheckpointError(
            f"a rewind of the checkpoint {location!r} was begun and not finished. Run 'midstream rewind' again, to any "
            f"epoch: that finishes the one that was begun first"
        )


def require_same(
    found: Identity, flow: str, sources: tuple[str, ...], location: str, exchanged: Collection[str] = ()
) -> None:
    """Refuse a flow of another name or with other sources, except for those that changes have added or removed."""
    if found.flow != flow:
        raise CheckpointError(
            f"the checkpoint {location!r} belongs to the flow {found.flow!r}, not to {flow!r}; use a "
            f"separate checkpoint for each flow"
        )
    if ({*found.sources} ^ {*sources}) - {*exchanged}:
        raise CheckpointError(
            f"the job in {location!r} reads the sources {', '.join(found.sources)}; the flow now has "
            f"{', '.join(sources)}. Sources change while the job runs (job.deploy, or an Insert or Remove), because a "
            f"source that was only renamed would be read again from its beginning. Start the old sources and deploy "
            f"the new ones, or use a new checkpoint"
        )
