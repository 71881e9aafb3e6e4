"""Finds the deployments that a script contains: a start of the deployed script, or of a later one, follows the script.

A deployment made the job run what a script said. When that script or a later version of it is started, the script
counts, and the records of the deployment and of the changes before it do not. A script from before the deployment is
recognised by what the deployment altered: it lacks an operator that was added, has one that was removed, or still has
earlier inputs or an earlier function. Then the records count, as for all other changes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

from midstream.change.configuration import Configuration
from midstream.change.plan_records import is_same_operator
from midstream.change.timeline import courses
from midstream.checkpoint.change_records import ChangeRecord, InsertRecord, RemoveRecord, RewireRecord, UpdateRecord
from midstream.flow.functions import likeness
from midstream.ids import Digest
from midstream.storage.blobs import BlobStore

__all__ = ["newer_functions", "newest_deployment_in"]


def newest_deployment_in(script: Configuration, applied: Sequence[ChangeRecord], store: BlobStore) -> int:
    """The number of the newest applied deployment that a script has; 0 if there is none."""
    for record in reversed(applied):
        if record.drops:
            return 0
        if record.deployed and all(_has(script, edit, record, store) for edit in record.edits):
            return record.number
    return 0


def _has(script: Configuration, edit: object, record: ChangeRecord, store: BlobStore) -> bool:
    graph = script.graph
    match edit:
        case InsertRecord(operator=name):
            gone = [each for each in record.edits if isinstance(each, RemoveRecord) and each.operator == name]
            return name in graph and not any(is_same_operator(graph[name], each) for each in gone)
        case RemoveRecord(operator=name):
            came = {each.operator for each in record.edits if isinstance(each, InsertRecord)}
            return name not in graph or name in came
        case RewireRecord(operator=name, before=before):
            return name not in graph or tuple(map(str, graph[name].inputs)) != before
        case UpdateRecord(operator=name):
            return name not in graph or not _is_from_before(script, edit, store)
    return True


def _is_from_before(script: Configuration, update: UpdateRecord, store: BlobStore) -> bool:
    """Whether a script has the function that an update replaced. True if that cannot be told."""
    mine = script.blobs.get(update.operator)
    if mine is None or mine == update.before:
        return True
    if mine == update.function:
        return False
    try:
        own = _likeness_of(script, update.operator)
        if own == _likeness(script, update.operator, update.function, store):
            return False
        return own == _likeness(script, update.operator, update.before, store)
    except Exception:  # a user's module may raise anything when it is imported; a function may be swept
        return True


def _likeness_of(script: Configuration, name: str) -> Digest:
    op, payload = script.graph[name], script.graph.payloads[name]
    return likeness(payload[0] if op.spec.divides else payload, name)


def _likeness(script: Configuration, name: str, digest: Digest, store: BlobStore) -> Digest:
    loaded: Any = script.graph[name].spec.loaded(store.get(digest))
    return likeness(loaded, name)


def newer_functions(script: Configuration, until: Sequence[ChangeRecord], store: BlobStore) -> tuple[str, ...]:
    """A sentence for each operator whose function in the script is not the one that these changes led to."""
    found = []
    for name, course in courses(until).items():
        update, revision = course.newest.update, course.newest.record.revision
        if name not in script.graph or script.blobs.get(name) == update.function:
            continue
        with contextlib.suppress(Exception):  # what cannot be compared is taken to differ
            if _likeness_of(script, name) == _likeness(script, name, update.function, store):
                continue
        found.append(
            f"operator {name!r} runs what the script says, which is newer than revision {revision}, in which it was "
            f"deployed"
        )
    return tuple(found)
