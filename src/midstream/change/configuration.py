"""What a job runs at a revision, and how one configuration is made of another."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from midstream.flow.model import Graph
from midstream.ids import Digest, Revision, StageIndex
from midstream.planner.assignment import Assignment, assign
from midstream.planner.programs import StateMigration, link, pack_blobs
from midstream.planner.stages import Plan, compile_plan
from midstream.storage.blobs import Blob, BlobStore

FIRST_REVISION = Revision(1)


@dataclass(frozen=True)
class Configuration:
    """A compiled plan, its stored programs, and for each stage behind an exchange who owns which bin.

    ``blobs`` names the stored function or table of each operator that has one, ``migrations`` what brings its state up
    to date.
    """

    plan: Plan
    programs: tuple[Digest, ...]
    revision: Revision
    assignments: Mapping[StageIndex, Assignment]
    blobs: Mapping[str, Digest] = field(default_factory=dict)
    migrations: Mapping[str, tuple[StateMigration, ...]] = field(default_factory=dict)

    @property
    def graph(self) -> Graph:
        """The flow."""
        return self.plan.graph

    def digests(self) -> frozenset[Digest]:
        """All blobs that it needs: programs, functions, tables and migrations."""
        steps = (step.function for steps in self.migrations.values() for step in steps)
        return frozenset({*self.programs, *self.blobs.values(), *steps})

    def as_revision(self, revision: Revision) -> Configuration:
        """The same under another number."""
        return replace(self, revision=revision)


def first_configuration(
    graph: Graph,
    store: BlobStore,
    partitions: int,
    blobs: Mapping[str, Blob] | None = None,
    recorded: Mapping[StageIndex, Assignment] | None = None,
) -> Configuration:
    """What a flow runs as it was written. ``blobs`` may have been packed before.

    Stages whose assignment is ``recorded`` go on with it; the others spread their bins over ``partitions``.
    """
    plan = compile_plan(graph)
    packed = pack_blobs(graph) if blobs is None else blobs
    digests = {name: store.put(blob) for name, blob in packed.items()}
    return configured(plan, store, FIRST_REVISION, assign(plan.exchanged, partitions, recorded or {}), digests, {})


def configured(
    plan: Plan,
    store: BlobStore,
    revision: Revision,
    assignments: Mapping[StageIndex, Assignment],
    blobs: Mapping[str, Digest],
    migrations: Mapping[str, tuple[StateMigration, ...]],
) -> Configuration:
    """Link a plan whose functions are stored already, and store its programs."""
    programs = tuple(store.put(program.to_blob()) for program in link(plan, blobs, migrations, assignments))
    return Configuration(plan, programs, revision, assignments, blobs, migrations)
