"""Who may write to a folder. What lies in a checkpoint, or in a copy of its state, is unpickled: it is code.

Folders that midstream makes for itself are open to their owner only; of others it is asked whether somebody else could
have put something there. Root is nobody else: it can do everything anyway.
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
    """Make a folder that only its owner can enter, and the folders above it as usual. One that is there stays."""
    os.makedirs(path, mode=0o700, exist_ok=True)


def others_can_write(folder: str, *, sticky_is_safe: bool = False) -> str | None:
    """Who besides this user, and root, can change what is in a folder, as the end of a sentence; None for nobody.

    A folder that is not there is nobody's. With ``sticky_is_safe``, a folder for temporary files passes: others
    can add to it, but not touch what is ours. Symbolic links are followed.

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
    """The same of a checkpoint: of its folder, and of those directly below if others can reach them."""
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
    """Say so in the log, once for each folder in a process."""
    if (why := others_can_write_checkpoint(path)) is not None:
        _warn(path, why)


@cache
def _warn(path: str, why: str) -> None:
    _log.warning(
        "the checkpoint %r %s. It holds functions and state, which the job unpickles: whoever writes there can run "
        "code in the job. Let only its user write there (chmod 700)",
        path,
        why,
    )


def _is_private_group(gid: int, uid: int) -> bool:
    """Many systems give each user a group of their own, of the same name."""
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
