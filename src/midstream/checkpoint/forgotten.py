"""State that was dropped while its job was not running. Pure.

A committed epoch is never written again, so the manifests from before keep naming the state. The record of the drop has
a revision of its own. It holds for the epochs under lower revisions, from which the job continues, and all later ones
lack the state anyway. A rewind to such an epoch takes the record back, and with it the drop.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from midstream.checkpoint.change_records import ChangeRecord, ForgetRecord, Outcome
from midstream.checkpoint.manifest import Manifest

__all__ = ["without_forgotten"]


def without_forgotten(manifest: Manifest, records: Iterable[ChangeRecord]) -> Manifest:
    """A manifest without the state that was dropped after its epoch.

    >>> from midstream.ids import Digest, Epoch, Revision
    >>> record = ChangeRecord(
    ...     1, Revision(2), 0.0, "ann@host", "epoch", (ForgetRecord("count"),), "", Outcome.APPLIED
    ... )
    >>> def left(revision):
    ...     lineages = {"count": b"...", "sum": b"..."}
    ...     manifest = Manifest(Epoch(7), revision, (), Digest("ab"), 0.0, {}, lineages)
    ...     return list(without_forgotten(manifest, [record]).lineages)
    >>> left(Revision(1))
    ['sum']
    >>> left(Revision(2))
    ['count', 'sum']
    """
    gone = {
        edit.operator
        for record in records
        if record.outcome is Outcome.APPLIED and record.revision > manifest.revision
        for edit in record.edits
        if isinstance(edit, ForgetRecord)
    }
    if gone.isdisjoint(manifest.lineages):
        return manifest
    left = {name: data for name, data in manifest.lineages.items() if name not in gone}
    return msgspec.structs.replace(manifest, lineages=left)
