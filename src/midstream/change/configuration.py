"""The configuration of a job at a revision, and its document in the checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from midstream.checkpoint.layouts import StateLayout
from midstream.checkpoint.manifest import Manifest
from midstream.flow.graph_format import CODEC, graph_from_document, graph_to_document
from midstream.flow.model import Graph
from midstream.ids import BINS, Digest, Revision
from midstream.planner.assignment import Assignments, assign, pack_assignments, unpack_assignments
from midstream.planner.carried_assignments import carried
from midstream.planner.division import with_wires
from midstream.planner.programs import StateMigration, link, pack_blobs
from midstream.planner.reassignment import rescaled
from midstream.planner.stages import Plan, WireNumbers, compile_plan
from midstream.storage.blobs import Blob, BlobStore
from midstream.storage.documents import read_document, write_document

__all__ = [
    "FIELDS",
    "FIRST_REVISION",
    "Configuration",
    "blobs_of",
    "configuration_left",
    "configuration_of",
    "first_configuration",
    "read_configuration",
    "state_kept",
]

FIRST_REVISION = Revision(1)


_WHAT = "the configuration of a revision"
FIELDS = {
    "blobs": Mapping[str, Digest],
    "migrations": Mapping[str, tuple[StateMigration, ...]],
    "wires": WireNumbers,
    "partitions": int,
    "kept": Mapping[str, StateLayout],
    "knobs": Mapping[str, int],
    "flushed": tuple[str, ...],
}
"""Fields of a configuration's document, in addition to the graph's."""
_LATER_FIELDS = ("partitions", "kept", "knobs", "flushed")
"""Fields that documents of older versions lack."""
_ASSIGNMENTS = "assignments"
"""A field of documents of older versions, whose manifests did not name the assignments separately."""


@dataclass(frozen=True)
class Configuration:
    """A compiled plan, the functions and tables of its operators, and the assignment of bins in each stage.

    ``assignments`` has the stages behind an exchange. ``blobs`` holds the digest of each operator's function or table,
    ``migrations`` the migrations that bring its state up to date. ``partitions`` is the number of partitions of a new
    stage, ``kept`` has the removed operators whose state is kept, ``knobs`` the knobs that do not have their defaults.
    ``flushed`` are operators that close everything open at the end of an epoch. The programs and two documents follow
    from these: one of the assignments, which every step of a migration makes anew, and one of everything else.
    :meth:`store` puts them into the blob store.
    """

    plan: Plan
    revision: Revision
    assignments: Assignments
    blobs: Mapping[str, Digest] = field(default_factory=dict)
    migrations: Mapping[str, tuple[StateMigration, ...]] = field(default_factory=dict)
    partitions: int = 1
    kept: Mapping[str, StateLayout] = field(default_factory=dict)
    knobs: Mapping[str, int] = field(default_factory=dict)
    flushed: tuple[str, ...] = ()
    initial: Mapping[str, Digest] = field(default_factory=dict, compare=False)
    """The packed initial states of operators that have none yet. Not in the document: manifests name what counts."""
    bins: int = BINS

    @property
    def graph(self) -> Graph:
        """The flow."""
        return self.plan.graph

    @cached_property
    def programs(self) -> tuple[Digest, ...]:
        """The digest of each stage's program."""
        return tuple(blob.digest for blob in self._linked)

    @cached_property
    def document(self) -> Blob:
        """Everything except the revision's number, the assignments and the user's objects, so that equal configurations
        share a blob."""
        return Blob.of(write_document({**graph_to_document(self.graph), **self._encoded()}))

    def _encoded(self) -> dict[str, object]:
        values = {
            "blobs": self.blobs,
            "migrations": self.migrations,
            "wires": self.plan.numbers,
            "partitions": self.partitions,
            "kept": self.kept,
            "knobs": self.knobs,
            "flushed": self.flushed,
        }
        return {name: CODEC.encode(values[name], hint) for name, hint in FIELDS.items()}

    @cached_property
    def owners(self) -> Blob:
        """The document of the assignments, which manifests name and tasks get with their orders."""
        return pack_assignments(self.assignments)

    @cached_property
    def _linked(self) -> tuple[Blob, ...]:
        return tuple(program.to_blob() for program in link(self.plan, self.blobs, self.migrations))

    def store(self, store: BlobStore) -> Configuration:
        """Put the programs and the documents into the blob store, for workers and restarts."""
        for blob in (*self._linked, self.document, self.owners):
            store.put(blob)
        return self

    def objects(self) -> frozenset[Digest]:
        """The user's objects: functions, tables and migrations."""
        steps = (step.function for steps in self.migrations.values() for step in steps)
        return frozenset({*self.blobs.values(), *steps, *self.initial.values()})

    def digests(self) -> frozenset[Digest]:
        """All blobs that tasks may read under it, and its document; the same before and after a step of a migration.

        The assignments are not among them: only a restart reads those, and its manifest protects them.
        """
        return self.objects() | {self.document.digest, *self.programs}

    def with_assignments(self, assignments: Assignments) -> Configuration:
        """The same configuration with other owners of bins. Its programs and its document stay the same blobs."""
        return replace(self, assignments=with_wires(self.plan, assignments))

    def as_revision(self, revision: Revision) -> Configuration:
        """The same configuration under another revision."""
        return replace(self, revision=revision)


def read_configuration(data: bytes, revision: Revision, owners: bytes | None = None) -> Configuration:
    """Read a configuration from its document and that of its assignments, which older versions wrote into the first.

    The user's objects are not loaded: the graph has no payloads.
    """
    found = read_document(data, _WHAT)
    older = {_ASSIGNMENTS: found.pop(_ASSIGNMENTS)} if _ASSIGNMENTS in found else {}
    if owners is not None:
        assignments = unpack_assignments(owners)
    else:
        assignments = CODEC.decode_fields(older, {_ASSIGNMENTS: Assignments}, _WHAT)[_ASSIGNMENTS]
    hints = {name: hint for name, hint in FIELDS.items() if name in found or name not in _LATER_FIELDS}
    own = {name: found.pop(name) for name in hints if name in found}
    fields = CODEC.decode_fields(own, hints, _WHAT)
    graph = graph_from_document(found, _WHAT)
    plan = compile_plan(graph, fields["wires"])
    partitions = max((each.partitions for each in assignments.values()), default=1)
    return Configuration(
        plan,
        revision,
        assignments,
        fields["blobs"],
        fields["migrations"],
        fields.get("partitions", partitions),
        fields.get("kept", {}),
        fields.get("knobs", {}),
        fields.get("flushed", ()),
    )


def configuration_of(manifest: Manifest, store: BlobStore) -> Configuration:
    """The configuration of the job at the end of a committed epoch."""
    owners = store.get(manifest.assignments) if manifest.assignments else None
    return read_configuration(store.get(manifest.configuration), manifest.revision, owners)


def blobs_of(manifest: Manifest, store: BlobStore) -> frozenset[Digest]:
    """All blobs that the job needs to continue from a committed epoch, by the names that the manifest gives them."""
    return configuration_of(manifest, store).objects() | manifest.digests()


def configuration_left(manifest: Manifest, store: BlobStore) -> Configuration:
    """The configuration that a restart continues from: without operators whose kept state is gone.

    Its document may differ from the manifest's, so it does not tell which blobs the epoch needs.
    """
    found = configuration_of(manifest, store)
    return replace(found, kept={name: each for name, each in found.kept.items() if name in manifest.lineages})


def first_configuration(
    graph: Graph,
    store: BlobStore,
    partitions: int,
    blobs: Mapping[str, Blob] | None = None,
    recorded: Assignments | None = None,
    before: Configuration | None = None,
    bins: int = BINS,
    knobs: Mapping[str, int] | None = None,
) -> Configuration:
    """Store and return the configuration of a flow as written. ``blobs`` may have been packed before.

    Stages whose assignment is ``recorded`` keep it; the others spread their ``bins`` over ``partitions``. ``before`` is
    what the job ran when it stopped, whose stages ``recorded`` names.
    """
    packed = pack_blobs(graph) if blobs is None else blobs
    kept: Mapping[str, StateLayout] = {}
    if before is None:
        plan = compile_plan(graph)
        assignments = assign(plan.exchanged, partitions, recorded or {}, bins)
    else:
        plan = compile_plan(graph, before.plan.numbers)
        # State lies where it was divided to, so that outlasts another number of partitions.
        divided = {
            stage: rescaled(each, partitions)
            for stage, each in before.assignments.items()
            if each.divided or each.united
        }
        assignments = carried(before.plan, {**divided, **(recorded or {})}, plan, partitions, bins)
        kept = state_kept(before, graph)
    with store.together():
        digests = {name: store.put(blob) for name, blob in packed.items()}
        first = Configuration(
            plan,
            FIRST_REVISION,
            with_wires(plan, assignments),
            digests,
            partitions=partitions,
            kept=kept,
            knobs=dict(knobs or {}),
            bins=bins,
        )
        return first.store(store)


def state_kept(before: Configuration, after: Graph) -> dict[str, StateLayout]:
    """The state of operators that ``after`` no longer has, kept for operators of the same names."""
    graph = before.graph
    left = {
        op.name: StateLayout(op, tuple(graph.schema_of(port) for port in op.inputs))
        for op in graph
        if op.spec.is_stateful
    }
    stateful = {op.name for op in after if op.spec.is_stateful}
    return {name: each for name, each in {**before.kept, **left}.items() if name not in stateful}
