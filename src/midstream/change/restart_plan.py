"""The changes that a start of a script on a checkpoint would make: like a deployment, for a job that is not running."""

from __future__ import annotations

import tempfile

from midstream.change.configuration import configuration_left, first_configuration
from midstream.change.plan_wait import described_plan
from midstream.change.restart import restart_of
from midstream.checkpoint.layouts import check_layouts
from midstream.checkpoint.location import Checkpoint
from midstream.drawing.change_picture import change_to_text
from midstream.errors import FlowError
from midstream.flow.model import Graph
from midstream.ids import Digest
from midstream.planner.change_plan import Scheduler, plan_change
from midstream.planner.merged_flow import merge
from midstream.planner.programs import pack_blobs
from midstream.storage.blobs import BlobStore

__all__ = ["restart_plan"]


def restart_plan(location: str, script: Graph) -> str:
    """The differences between what ``flow.start`` with this script and checkpoint would run and what the job ran, as
    text.

    Makes the checks of a start, and writes nothing to the checkpoint. Raises :class:`MidstreamError` if the script does
    not fit.
    """
    checkpoint = Checkpoint.of_any_flow(location)
    if checkpoint.identity.flow != script.name:
        raise FlowError(
            f"the script is of flow {script.name!r}, and {location!r} belongs to flow {checkpoint.identity.flow!r}"
        )
    Checkpoint.look(location, script)  # refuses other sources
    newest = checkpoint.newest_manifest()
    if newest is None:
        return "no epoch has been committed yet: the job starts with the script"
    before, bins = configuration_left(newest, checkpoint.blobs), checkpoint.identity.bins
    packed = pack_blobs(script)
    with tempfile.TemporaryDirectory(prefix="midstream-plan-") as folder:
        store = _Overlay(folder, checkpoint.blobs)
        first = first_configuration(script, store, before.partitions, packed, before.assignments, before, bins)
        restart = restart_of(first, store, checkpoint.changes.records(), newest.revision, before)
    after = restart.configuration
    check_layouts(after.plan, checkpoint)
    updated = [name for name, digest in after.blobs.items() if before.blobs.get(name, digest) != digest]
    both = [name for name in updated if name in before.graph]
    replaced = {op.name for op in after.graph if op.name in before.graph and op.kind != before.graph[op.name].kind}
    merged = merge(before.graph, after.graph, [name for name in both if name not in replaced], replaced)
    if not (merged.changed or restart.messages):
        return "the job would run what it ran when it stopped: nothing changes"
    lines = [*described_plan(before, after, merged)]
    lines += [f"{name!r} runs another function" for name in both]
    lines += [f"note: {message}" for message in restart.messages]
    if not merged.changed:
        return "\n".join(lines)
    picture = change_to_text(merged.graph, plan_change(merged.graph, merged.changed, Scheduler.EPOCH), merged)
    return "\n".join([picture, "", *lines, "takes effect with the first epoch of the start"])


class _Overlay(BlobStore):
    """A store that reads from another one, and writes into a folder of its own."""

    def __init__(self, location: str, below: BlobStore) -> None:
        super().__init__(location, durable=False)
        self._below = below

    def get(self, digest: Digest) -> bytes:
        """A blob of either store."""
        return super().get(digest) if super().has(digest) else self._below.get(digest)
