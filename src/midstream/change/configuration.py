"""What a job runs at a revision, and how one configuration is made of another."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from midstream.flow.model import Graph
from midstream.ids import BINS, Digest, Revision
from midstream.planner.programs import StateMigration, link, pack_blobs
from midstream.planner.stages import Plan, compile_plan
from midstream.storage.blobs import Blob, BlobStore

FIRST_REVISION = Revision(1)


@dataclass(frozen=True)
class Configuration:
    """A compiled plan, its stored programs, and who owns which bin.

    ``blobs`` names the stored function or table of each operator that has one, ``migrations`` what brings its state up
    to date.
    """

    plan: Plan
    programs: tuple[Digest, ...]
    revision: Revision
    partitions: int
    blobs: Mapping[str, Digest] = field(default_factory=dict)
    migrations: Mapping[str, tuple[StateMigration, ...]] = field(default_factory=dict)

    @property
    def graph(self) -> Graph:
        """The flow."""
        return self.plan.graph

    @property
    def bins(self) -> tuple[int, ...]:
        """Which partition of a stage owns each bin."""
        return tuple(b % self.partitions for b in range(BINS))

    def digests(self) -> frozenset[Digest]:
        """All blobs that it needs: programs, functions, tables and migrations."""
        steps = (step.function for steps in self.migrations.values() for step in steps)
        return frozenset({*self.programs, *self.blobs.values(), *steps})

    def as_revision(self, revision: Revision) -> Configuration:
        """The same under another number."""
        return replace(self, revision=revision)


def first_configuration(
    graph: Graph, store: BlobStore, partitions: int, blobs: Mapping[str, Blob] | None = None
) -> Configuration:
    """What a flow runs as it was written. ``blobs`` may have been packed before."""
    packed = pack_blobs(graph) if blobs is None else blobs
    digests = {name: store.put(blob) for name, blob in packed.items()}
    return configured(graph, store, FIRST_REVISION, partitions, digests, {})


def configured(
    graph: Graph,
    store: BlobStore,
    revision: Revision,
    partitions: int,
    blobs: Mapping[str, Digest],
    migrations: Mapping[str, tuple[StateMigration, ...]],
) -> Configuration:
    """Compile a graph whose functions are stored already, and store its programs."""
    plan = compile_plan(graph)
    programs = tuple(store.put(program.to_blob()) for program in link(plan, blobs, migrations))
    return Configuration(plan, programs, revision, partitions, blobs, migrations)
