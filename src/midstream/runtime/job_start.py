"""The start of a job, on both runtimes: what is checked, claimed and continued.

In this order, because a start that is refused must leave everything as it was: :func:`check` only reads, :func:`claim`
takes possession, and :func:`restart` records how the changes of the last driver ended.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping

from midstream.change.configuration import Configuration, configuration_left, configuration_of
from midstream.change.restart import Restart, drop_changes, restart_of
from midstream.change.revert import taken_back
from midstream.checkpoint.change_records import ChangeRecord, whoami
from midstream.checkpoint.layouts import check_layouts
from midstream.checkpoint.location import Checkpoint
from midstream.checkpoint.sink_marker import SinkMarker, check_file_sinks, mark_folders
from midstream.errors import CheckpointError
from midstream.flow.model import Graph
from midstream.ids import Revision
from midstream.planner.stages import compile_plan
from midstream.runtime.table_claims import check_tables, claim_tables

__all__ = ["check", "claim", "restart", "settle_sources"]

_log = logging.getLogger("midstream")


def check(graph: Graph, checkpoint: Checkpoint, *, drops: bool = False) -> dict[str, SinkMarker]:
    """Refuse a flow that does not fit the stored state, and sinks that belong to others.

    Returns the markers for folders that no job owns yet. With changes to continue, what the job will run is
    not known yet; then :func:`restart` checks the state.
    """
    if drops or not checkpoint.changes.records():
        check_layouts(compile_plan(graph), checkpoint)
    free_folders = check_file_sinks(graph, checkpoint.identity.job)
    check_tables(graph, checkpoint.identity.job)
    return free_folders


def claim(graph: Graph, checkpoint: Checkpoint, free_folders: Mapping[str, SinkMarker]) -> Graph:
    """Claim the folders and tables of the sinks; return the graph whose sinks may write. The checkpoint is claimed."""
    checkpoint.require_open()
    mark_folders(free_folders)
    return claim_tables(graph, checkpoint.identity.job)


def restart(
    first: Configuration, checkpoint: Checkpoint, *, drops: bool = False, revert_to: int | None = None
) -> Restart:
    """What the job runs: the script's configuration ``first``, with the changes that were made while it ran.

    ``drops`` leaves these changes out, ``revert_to`` goes back to a revision; both are recorded as changes, so that the
    next start does not undo changes that are made from now on.
    """
    log = checkpoint.changes
    newest = checkpoint.newest_manifest()
    committed = None if newest is None else newest.revision
    if drops:
        for message in log.set_damage_aside():
            _log.warning("%s", message)
        drop_changes(first, log, committed, by=whoami(), now=time.time())
    records = log.records()
    settled: tuple[ChangeRecord, ...] = ()
    if revert_to is not None:
        taken = taken_back(
            records,
            Revision(revert_to),
            committed,
            checkpoint.blobs,
            {},
            by=whoami(),
            now=time.time(),
            how="at a start",
        )
        records, settled = list(taken.records), taken.changed
    newest = checkpoint.newest_manifest()  # a damaged log could not say what was dropped before
    before = None if newest is None else configuration_left(newest, checkpoint.blobs)
    found = restart_of(first, checkpoint.blobs, records, committed, before)
    check_layouts(found.configuration.plan, checkpoint)
    for record in (*settled, *found.settled):
        log.keep(record)
    return found


def settle_sources(checkpoint: Checkpoint, graph: Graph) -> None:
    """Make sure that the log of the engine's query is for the sources of the flow that the job runs now."""
    before = checkpoint.identity.sources
    if tuple(sorted(graph.sources)) == before:
        return
    log, newest = checkpoint.spark_files, checkpoint.newest_manifest()
    if newest is not None and log.holds_state():
        committed = configuration_of(newest, checkpoint.blobs).graph.sources
        if tuple(sorted(committed)) == before:  # else nothing that counts was computed with that state
            raise CheckpointError(
                f"the job in {checkpoint.location!r} reads the sources {', '.join(before)}, and would now read "
                f"{', '.join(sorted(graph.sources))}. That is not possible, because a DataFrame of one of them keeps "
                f"state in Spark ({log.location}/state), and Spark knows that by its place in the query. Start the "
                f"sources of before, or use a new checkpoint"
            )
    checkpoint.change_sources(graph.sources)
