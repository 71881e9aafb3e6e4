"""The folder on a worker's own disk for its copy of state. What is in it is unpickled: it must be this user's alone."""

from __future__ import annotations

import os

from midstream.errors import StateError
from midstream.storage.ownership import make_private, others_can_write

__all__ = ["check_local_state", "own_local_folder"]


def check_local_state(folder: str) -> None:
    """Refuse a ``local_state=`` in which others could change the copy of state. One that is not there yet is fine."""
    if (why := others_can_write(folder, sticky_is_safe=True)) is not None:
        raise StateError(
            f"local_state={folder!r} {why}. Workers unpickle the state that they keep there, so whoever can write "
            f"there can run code in the job. Give a folder of this user's own (mode 700), or none"
        )


def own_local_folder(folder: str, job: str) -> str:
    """The folder of a job below ``folder``, made if need be, that only this user can enter."""
    check_local_state(folder)
    own = os.path.join(folder, job)
    try:
        make_private(own)
        if (why := others_can_write(own)) is None:
            os.chmod(own, 0o700)
            return own
    except OSError as error:
        raise StateError(f"the folder {own!r} for a copy of state cannot be used: {error}") from error
    raise StateError(
        f"the folder {own!r} {why}. It is for this worker's copy of state, which is unpickled; remove it, or give "
        f"another local_state="
    )
