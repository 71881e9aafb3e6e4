"""Checks who may write to a folder. A checkpoint, or a copy of its state, is unpickled, so its content is code.

Folders that midstream creates for itself are accessible to their owner only; other folders are checked for whether
someone else could have written there. Root does not count: it can do everything anyway.
"""

from __future__ import annotations

import contextlib
import grp
import logging
import os
import pwd
import stat
from functools import cache

__all__ = ["make_private", "others_can_write", "others_can_write_checkpoint", "warn_if_others_can_write"]

_log = logging.getLogger("midstream")


def make_private(path: str) -> None:
    """Create a folder that only its owner can enter; its parents get the usual mode. An existing one is unchanged."""
    os.makedirs(path, mode=0o700, exist_ok=True)


def others_can_write(folder: str, *, sticky_is_safe: bool = False) -> str | None:
    """Who besides this user and root can change a folder's content, as the end of a sentence; None if nobody can.

    None if the folder does not exist. With ``sticky_is_safe``, a folder for temporary files passes: others can add
    files, but not touch ours. Symbolic links are followed.

    >>> others_can_write("/nowhere")
    """
    try:
        found = os.stat(folder)
    except (FileNotFoundError, NotADirectoryError):
        return None
    mode = stat.S_IMODE(found.st_mode)
    if found.st_uid not in (os.geteuid(), 0):
        return f"belongs to {_user(found.st_uid)}, while this process runs as {_user(os.geteuid())}"
    if sticky_is_safe and mode & stat.S_ISVTX:
        return None
    if mode & stat.S_IWOTH:
        return f"can be written by everybody (mode {mode:04o})"
    if mode & stat.S_IWGRP and not _is_private_group(found.st_gid, found.st_uid):
        return f"can be written by the group {_group(found.st_gid)} (mode {mode:04o})"
    return None


def others_can_write_checkpoint(root: str) -> str | None:
    """Like :func:`others_can_write`, for a checkpoint: its folder, and the ones directly below if reachable."""
    if (why := others_can_write(root)) is not None:
        return why
    with contextlib.suppress(FileNotFoundError):
        if os.stat(root).st_mode & (stat.S_IXGRP | stat.S_IXOTH):
            with os.scandir(root) as entries:
                for entry in entries:
                    if entry.is_dir() and (why := others_can_write(entry.path)) is not None:
                        return f"has a folder {entry.name!r} that {why}"
    return None


def warn_if_others_can_write(path: str) -> None:
    """Log a warning, once per folder and process."""
    if (why := others_can_write_checkpoint(path)) is not None:
        _warn(path, why)


@cache
def _warn(path: str, why: str) -> None:
    _log.warning(
        "the checkpoint %r %s. It holds functions and state, which the job unpickles: anyone who can write there can "
        "run code in the job. Let only the job's user write there (chmod 700)",
        path,
        why,
    )


def _is_private_group(gid: int, uid: int) -> bool:
    """Whether this is a user's private group: many systems give each user a group with the same name."""
    try:
        group = grp.getgrgid(gid)
        owner = pwd.getpwuid(uid).pw_name
    except KeyError:
        return False
    return group.gr_name == owner and set(group.gr_mem) <= {owner}


def _user(uid: int) -> str:
    try:
        return repr(pwd.getpwuid(uid).pw_name)
    except KeyError:
        return f"user {uid}"


def _group(gid: int) -> str:
    try:
        return repr(grp.getgrgid(gid).gr_name)
    except KeyError:
        return str(gid)
