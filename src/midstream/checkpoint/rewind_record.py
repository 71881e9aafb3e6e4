"""The record of a rewind that is under way: all that its steps need, so that after a crash between two of them all are
simply run again."""

from __future__ import annotations

import msgspec

from midstream.checkpoint.manifest import Manifest
from midstream.ids import Digest, Epoch

__all__ = ["Rewind"]


class Rewind(msgspec.Struct, frozen=True):
    """The content of ``rewind.json``."""

    manifest: Manifest
    """The manifest of the epoch that the job goes back to."""
    timeline: int
    """The number of the job's timeline from then on."""
    folders: tuple[str, ...]
    """The folders of file sinks from which later rows go."""
    by: str
    begun_at: float
    spark: dict[str, Digest] = {}
    """Spark's own files of a savepoint, by their names below ``spark/``: blobs with their content."""
    savepoint: str | None = None
    """Its name, if the job goes back to one."""

    @property
    def epoch(self) -> Epoch:
        """The epoch that the job goes back to."""
        return self.manifest.epoch

    @property
    def target(self) -> str:
        """The epoch that it goes back to, in words."""
        named = "" if self.savepoint is None else f" (savepoint {self.savepoint!r})"
        return f"epoch {self.epoch}{named}"
