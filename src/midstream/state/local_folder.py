"""The folder on a worker's disk for its copy of state. Its contents are unpickled, so only this user may write it."""

from __future__ import annotations

import os

from midstream.errors import StateError
from midstream.storage.ownership import make_private, others_can_write

__all__ = ["check_local_state", "own_local_folder"]


def check_local_state(folder: str) -> None:
    """Refuse a ``local_state=`` folder that other users could write to. A folder that does not exist yet is fine."""
    if (why := others_can_write(folder, sticky_is_safe=True)) is not None:
        raise StateError(
            f"local_state={folder!r} {why}. Workers unpickle the state that they keep there, so anyone who can write "
            f"there can run code in the job. Use a folder that only this user can write to (mode 700), or none"
        )


def own_local_folder(folder: str, job: str) -> str:
    """The folder of a job below ``folder``, accessible only to this user; created if needed."""
    check_local_state(folder)
    own = os.path.join(folder, job)
    try:
        make_private(own)
        if (why := others_can_write(own)) is None:
            os.chmod(own, 0o700)
            return own
    except OSError as error:
        raise StateError(f"the folder {own!r} for the local copy of state cannot be used: {error}") from error
    raise StateError(
        f"the folder {own!r} {why}. The worker unpickles its copy of state from there; remove the folder, or set "
        f"another local_state="
    )
