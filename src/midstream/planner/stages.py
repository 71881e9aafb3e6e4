"""Compiles a graph into stages: which operators run together, and how rows travel between them.

The vocabulary, from large to small:

* A *segment* is a part of the flow without a ``transform``. Transforms run between segments, in Catalyst.
* A *stage* holds the operators of one segment that need the same number of exchanges before them (their *depth*). The
  stages of a segment form one chain with a single exchange between neighbours, whatever the shape of the graph.
* A *wire* carries the rows of one output port to a later place: a later stage, or an *outlet* (a transform or sink at
  the end of a segment). Consumers in one place share a wire, so rows that are needed twice there travel once. Port and
  place identify a wire: it has the same number in all plans of a job.

:func:`compile_plan` is a list of passes, each a pure function of the results of earlier passes.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise

from midstream.flow.model import Graph, Operator, Port
from midstream.flow.spec import Delivery
from midstream.ids import StageIndex, WireId


@dataclass(frozen=True, order=True)
class Place:
    """Where an operator runs: its segment, and its depth within it. Ordered as rows pass them."""

    segment: int
    depth: int


class Leaves(enum.StrEnum):
    """How rows leave a stage."""

    EXCHANGE = "exchange"
    """As frames, through one Spark exchange, to the next stage of the segment."""

    FRAMES = "frames"
    """As frames that several readers (transforms, sinks, later segments) pick from."""

    TYPED = "typed"
    """As plain columns, straight to the one sink that reads them as a DataFrame."""

    NOTHING = "nothing"
    """Not at all: tasks write the rows of every sink themselves."""


@dataclass(frozen=True)
class Wire:
    """Rows of ``port`` on their way from the stage that emits them to ``consumers``.

    ``target`` is the stage of the consumers; ``None`` says that they are outlets of segment ``segment``. If the wire is
    written, its consumers are sinks whose rows the tasks of ``origin`` write, so its rows go nowhere.
    ``key`` names the columns that decide the destination partition; without a key rows stay in their partition.
    """

    id: WireId
    port: Port
    origin: StageIndex
    target: StageIndex | None
    consumers: tuple[str, ...]
    key: tuple[str, ...] | None
    segment: int
    is_written: bool = False

    def __str__(self) -> str:
        end = "written" if self.is_written else "outlet" if self.target is None else f"stage {self.target}"
        key = f" by ({', '.join(self.key)})" if self.key is not None else ""
        return f"wire {self.id}: {self.port} → {end}{key} [{', '.join(self.consumers)}]"


@dataclass(frozen=True)
class NumberedWire:
    """A wire's number and its identity across plans: its port and the place it leads to (None: outlets)."""

    port: Port
    target: Place | None
    is_written: bool
    id: WireId
    consumers: tuple[str, ...] = ()
    """Its readers; unknown for wires that older versions numbered."""


@dataclass(frozen=True)
class WireNumbers:
    """The numbers of wires in a job: ``wires`` are those of its newest plan, ``used`` counts all numbers ever used."""

    wires: tuple[NumberedWire, ...] = ()
    used: int = 0


_NO_WIRES = WireNumbers()


@dataclass(frozen=True)
class Stage:
    """One link of the chain.

    ``operators`` are in the graph's order. ``inlets`` are the operators (sources, and transforms of the previous
    segment) whose rows enter here as plain columns; ``receives`` are the wires that end here, ``carries`` those that
    only pass through, ``emits`` those that start here.
    """

    index: StageIndex
    segment: int
    operators: tuple[str, ...]
    inlets: tuple[str, ...]
    receives: tuple[WireId, ...]
    carries: tuple[WireId, ...]
    emits: tuple[WireId, ...]
    leaves: Leaves

    @property
    def takes_frames(self) -> bool:
        """Whether frames arrive here, from an exchange or from an earlier segment."""
        return bool(self.receives or self.carries)


@dataclass(frozen=True)
class Plan:
    """A compiled flow: stages in the order they run, the wires between them, and each outlet's input.

    ``feeds`` maps every transform and sink to the wire or the other transform that its rows come from.
    """

    graph: Graph
    stages: tuple[Stage, ...]
    wires: tuple[Wire, ...]
    feeds: Mapping[str, WireId | str]
    numbers: WireNumbers

    def wire(self, number: WireId) -> Wire:
        """A wire by its number."""
        return next(wire for wire in self.wires if wire.id == number)

    def segment(self, number: int) -> tuple[Stage, ...]:
        """The stages of one segment, in order."""
        return tuple(stage for stage in self.stages if stage.segment == number)

    @property
    def exchanged(self) -> tuple[StageIndex, ...]:
        """The stages behind an exchange. The others have as many partitions as their input."""
        return tuple(after.index for stage, after in pairwise(self.stages) if stage.leaves is Leaves.EXCHANGE)

    @property
    def segments(self) -> int:
        """Number of segments."""
        return 1 + max(stage.segment for stage in self.stages)

    def describe(self) -> str:
        """The plan as text, for snapshot tests and ``midstream graph --stages``."""
        lines: list[str] = []
        for stage in self.stages:
            lines.append(f"stage {stage.index} (segment {stage.segment}) leaves as {stage.leaves}")
            lines.append(f"  runs: {', '.join(stage.operators) or '—'}")
            for label, found in (
                ("inlets", stage.inlets),
                ("receives", stage.receives),
                ("carries", stage.carries),
                ("emits", stage.emits),
            ):
                if found:
                    lines.append(f"  {label}: {', '.join(str(item) for item in found)}")
        lines += [str(wire) for wire in self.wires]
        lines += [
            f"{name} reads {f'wire {feed}' if isinstance(feed, int) else feed}" for name, feed in self.feeds.items()
        ]
        return "\n".join(lines)


def compile_plan(graph: Graph, before: WireNumbers = _NO_WIRES) -> Plan:
    """Compile a validated graph.

    ``before`` are the wire numbers of the job's current plan: existing wires keep their numbers, and no number is ever
    reused for another wire, so that rows in transit are never mistaken for others.

    >>> import pyarrow as pa
    >>> from midstream.flow.model import KeyBy, Sink, Source
    >>> from midstream.flow.spec import Form
    >>> from midstream.operators.map import Map
    >>> rows = pa.schema([("user", pa.string())])
    >>> graph = Graph("g", (
    ...     Operator("in", Source(), (), rows),
    ...     Operator("by_user", KeyBy(("user",)), (Port("in"),), rows),
    ...     Operator("score", Map(Form.ROWS), (Port("by_user"),), rows),
    ...     Operator("out", Sink(), (Port("score"),), rows),
    ... ))
    >>> print(compile_plan(graph).describe())
    stage 0 (segment 0) leaves as exchange
      runs: in, by_user
      inlets: in
      emits: 0
    stage 1 (segment 0) leaves as typed
      runs: score
      receives: 0
      emits: 1
    wire 0: by_user → stage 1 by (user) [score]
    wire 1: score → outlet [out]
    out reads wire 1
    """
    places = place_operators(graph)
    runs_at = number_stages(graph, places)
    wires, numbers = lay_wires(graph, places, runs_at, before)
    feeds = feed_outlets(graph, wires)
    stages = assemble_stages(graph, runs_at, wires)
    return Plan(graph, stages, wires, feeds, numbers)


def place_operators(graph: Graph) -> dict[str, Place]:
    """Pass 1: an operator runs at the first place that all of its inputs can reach.

    After a key_by that is one exchange deeper; after a transform it is the start of the next segment. An outlet is
    placed where its rows are, because Catalyst does its own shuffling.
    """
    places: dict[str, Place] = {}
    for op in graph:
        place = max((_arrival(graph, places, port, op) for port in op.inputs), default=Place(0, 0))
        keyed = any(graph.is_keyed(port) or _comes_with_key(graph, port, op) for port in op.inputs)
        keyed = keyed and not op.spec.is_outlet
        # A segment does not start with an exchange, so rows keyed in an earlier segment would not have met yet.
        places[op.name] = Place(place.segment, 1) if keyed and place.depth == 0 else place
    return places


def _comes_with_key(graph: Graph, port: Port, consumer: Operator) -> bool:
    """Whether rows that were keyed further up must still be where their key belongs when they reach this consumer."""
    return consumer.spec.is_stateful and graph.key_of(port) is not None


def _arrival(graph: Graph, places: Mapping[str, Place], port: Port, consumer: Operator) -> Place:
    producer, place = graph[port.operator], places[port.operator]
    if consumer.spec.is_outlet:
        return place
    if graph.is_keyed(port):
        return Place(place.segment, place.depth + 1)
    return Place(place.segment + 1, 0) if producer.spec.divides else place


def number_stages(graph: Graph, places: Mapping[str, Place]) -> dict[str, tuple[StageIndex, int]]:
    """Pass 2: number the places at which operators run; returns the stage and segment of each operator.

    Sinks have no stage. A transform has one if other operators consume it: its rows enter the next segment there.
    """
    runs_at: dict[str, Place] = {}
    for op in graph:
        if op.spec.divides:
            if any(not graph[name].spec.is_outlet for name in graph.consumers(Port(op.name))):
                runs_at[op.name] = Place(places[op.name].segment + 1, 0)
        elif not op.spec.is_outlet:
            runs_at[op.name] = places[op.name]
    index = {place: StageIndex(i) for i, place in enumerate(sorted(set(runs_at.values())))}
    return {name: (index[place], place.segment) for name, place in runs_at.items()}


def lay_wires(
    graph: Graph,
    places: Mapping[str, Place],
    runs_at: Mapping[str, tuple[StageIndex, int]],
    before: WireNumbers,
) -> tuple[tuple[Wire, ...], WireNumbers]:
    """Pass 3: one wire for each port and each later place that consumes it, in the graph's order.

    An existing wire keeps its number. So does a wire whose port is another one now, while its readers are the same: the
    rows on it belong to them, whoever sent them. A new wire gets the next number that was never used.
    """
    drafts: list[tuple[Port, Place | None, bool, Wire]] = []
    for op in graph:
        if op.name not in runs_at:
            continue
        origin, segment = runs_at[op.name]
        for port in op.ports:
            ends: dict[tuple[StageIndex | None, bool], list[str]] = {}
            for name in graph.consumers(port):
                if graph[name].spec.is_outlet:
                    # A transform's own outlets read its DataFrame; no wire is needed.
                    if not op.spec.divides:
                        ends.setdefault((None, _is_written(graph[name])), []).append(name)
                elif runs_at[name][0] != origin:
                    ends.setdefault((runs_at[name][0], False), []).append(name)
            for (end, is_written), names in ends.items():
                needs_key = graph.is_keyed(port) or any(_comes_with_key(graph, port, graph[name]) for name in names)
                key = graph.key_of(port) if needs_key else None
                target = None if end is None else places[names[0]]
                wire = Wire(
                    id=WireId(-1),
                    port=port,
                    origin=origin,
                    target=end,
                    consumers=tuple(names),
                    key=None if end is None else key,
                    segment=segment,
                    is_written=is_written,
                )
                drafts.append((port, target, is_written, wire))
    return _numbered(drafts, before)


def _numbered(
    drafts: Iterable[tuple[Port, Place | None, bool, Wire]], before: WireNumbers
) -> tuple[tuple[Wire, ...], WireNumbers]:
    """Give wires their numbers; see :func:`lay_wires`."""
    drafts = list(drafts)
    known = {(each.port, each.target, each.is_written): each.id for each in before.wires}
    staying = {(port, target, is_written) for port, target, is_written, _ in drafts}
    # The one wire of an operator that is gone, in favour of another one, whose rows go to the same readers.
    left: dict[tuple[Place | None, bool, tuple[str, ...]], list[WireId]] = {}
    for each in before.wires:
        if (each.port, each.target, each.is_written) not in staying and each.consumers:
            left.setdefault((each.target, each.is_written, each.consumers), []).append(each.id)
    coming = Counter(
        (target, is_written, wire.consumers)
        for port, target, is_written, wire in drafts
        if (port, target, is_written) not in known
    )
    used = before.used
    wires, numbered = [], []
    for port, target, is_written, wire in drafts:
        number = known.get((port, target, is_written))
        end = (target, is_written, wire.consumers)
        if number is None and coming[end] == 1 and len(left.get(end, ())) == 1:
            [number] = left[end]
        if number is None:
            number, used = WireId(used), used + 1
        wires.append(replace(wire, id=number))
        numbered.append(NumberedWire(port, target, is_written, number, wire.consumers))
    return tuple(wires), WireNumbers(tuple(numbered), used)


def _is_written(outlet: Operator) -> bool:
    return outlet.delivery in (Delivery.TASKS, Delivery.NONE)


def feed_outlets(graph: Graph, wires: Iterable[Wire]) -> dict[str, WireId | str]:
    """Pass 4: find the input of each transform and sink."""
    by_consumer = {name: wire.id for wire in wires if wire.target is None for name in wire.consumers}
    return {op.name: by_consumer.get(op.name, op.inputs[0].operator) for op in graph if op.spec.is_outlet}


def assemble_stages(
    graph: Graph, runs_at: Mapping[str, tuple[StageIndex, int]], wires: tuple[Wire, ...]
) -> tuple[Stage, ...]:
    """Pass 5: collect what runs in, enters, passes through and leaves each stage."""
    segment_of = dict(sorted(set(runs_at.values())))
    last_of_segment = {segment: index for index, segment in segment_of.items()}  # in order, so the last one stays
    stages: list[Stage] = []
    for index, segment in segment_of.items():
        operators = tuple(op for op in graph if op.name in runs_at and runs_at[op.name][0] == index)
        emits = tuple(wire for wire in wires if wire.origin == index)
        carries = tuple(wire for wire in wires if wire.origin < index < _end(wire, last_of_segment))
        ends_segment = index == last_of_segment[segment]
        stages.append(
            Stage(
                index=index,
                segment=segment,
                operators=tuple(op.name for op in operators),
                # By name: Spark numbers a query's sources by position, and a script may declare them in another order.
                inlets=tuple(sorted(op.name for op in operators if op.spec.is_inlet)),
                receives=tuple(wire.id for wire in wires if wire.target == index),
                carries=tuple(wire.id for wire in carries),
                emits=tuple(wire.id for wire in emits),
                leaves=_leaves(graph, emits, carries) if ends_segment else Leaves.EXCHANGE,
            )
        )
    return tuple(stages)


def _end(wire: Wire, last_of_segment: Mapping[int, StageIndex]) -> int:
    """First stage that no longer sees the wire: its target, or the one after the segment it leaves from.

    Rows that tasks write themselves are seen by nobody else.
    """
    if wire.is_written:
        return wire.origin
    return last_of_segment[wire.segment] + 1 if wire.target is None else wire.target


def _leaves(graph: Graph, emits: tuple[Wire, ...], carries: tuple[Wire, ...]) -> Leaves:
    """Typed only for one sink that reads a DataFrame of rows made here. All others, and what passes through, are
    frames."""
    leaving = [wire for wire in emits if not wire.is_written]
    if not leaving and not carries:
        return Leaves.NOTHING
    outlets = [name for wire in leaving for name in wire.consumers if wire.target is None]
    is_single = len(outlets) == len(leaving) == 1 and not carries
    return Leaves.TYPED if is_single and graph[outlets[0]].delivery is Delivery.FRAME else Leaves.FRAMES
