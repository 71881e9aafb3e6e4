"""Whether a command may unpickle from a checkpoint that was named on the command line."""

from __future__ import annotations

from typing import Annotated

import pyarrow.fs as pafs
import typer

from midstream.errors import CheckpointError
from midstream.storage.blobs import filesystem_of
from midstream.storage.ownership import others_can_write_checkpoint

__all__ = ["TrustOption", "require_trust"]

TrustOption = Annotated[
    bool, typer.Option("--trust", help="Read it although others can write there, and so run code in this command.")
]


def require_trust(location: str, trusted: bool) -> None:
    """Refuse a local checkpoint where someone else could have put a pickle, unless ``trusted``.

    On other file systems it is unknown who can write; they pass.
    """
    fs, path = filesystem_of(location)
    if trusted or not isinstance(fs, pafs.LocalFileSystem):
        return
    if (why := others_can_write_checkpoint(path)) is not None:
        raise CheckpointError(
            f"the checkpoint {location!r} {why}. To show its state means to unpickle what lies there, and a pickle can "
            f"run any code as you. If you trust everybody who can write there, give --trust"
        )
