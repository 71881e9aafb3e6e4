"""Reads the state that a run has left in its checkpoint, as users' values, and compares it with the oracle's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pyarrow as pa

from midstream.checkpoint.location import Checkpoint
from midstream.engine.aggregation.totals import TotalsOf
from midstream.engine.joining.times import Nearness
from midstream.flow.model import Graph, Operator
from midstream.operators.aggregate import Aggregate
from midstream.operators.distinct import Distinct
from midstream.operators.join import Join
from midstream.operators.process import Process
from midstream.state.contents import contents, in_namespace, shown_rows
from midstream.state.keys import Namespace, decode_key, split_item, split_timer
from midstream.state.lineage import Lineage
from midstream.state.values import ObjectCodec
from tests.keyed_oracle import CLOCK, EVENT, Firsts, Key, KeyedOracle, Pairs, Remembered, Running, Sessions, Windows

WAITING = {"left": Namespace.JOIN_WAITING, "right": Namespace.JOIN_RIGHT_WAITING}
"""Where the rows of either side of a join wait."""


class Left:
    """What is left of one operator's state."""

    def __init__(self, rows: pa.Table, key_schema: pa.Schema) -> None:
        self._rows = rows
        self._key_schema = key_schema

    def of(self, namespace: Namespace) -> Iterator[tuple[bytes, bytes]]:
        rows = in_namespace(self._rows, namespace)
        yield from zip(rows["key"].to_pylist(), rows["value"].to_pylist(), strict=True)

    def key(self, stored: bytes) -> Key:
        return decode_key(stored, self._key_schema)

    def timed(self, namespace: Namespace) -> set[tuple[int, Key]]:
        """Entries that are ordered by time."""
        return {(time, self.key(key)) for time, key in (split_timer(stored) for stored, _ in self.of(namespace))}


def left_of(location: str, graph: Graph) -> dict[str, Left]:
    """What the newest manifest of a checkpoint stands for, by operator."""
    checkpoint = Checkpoint.look(location, graph)
    manifest = checkpoint.newest_manifest()
    assert manifest is not None
    space = checkpoint.states.space
    lineages = {name: Lineage.decode(data) for name, data in manifest.lineages.items()}
    found = {}
    for op in graph:
        if op.spec.is_stateful:
            lineage = lineages.get(op.name, Lineage.start(op.name, space.bins))
            found[op.name] = Left(shown_rows(contents(checkpoint.states, lineage), space), key_schema(graph, op))
    return found


def key_schema(graph: Graph, op: Operator) -> pa.Schema:
    names = op.spec.keyed_by
    return pa.schema([graph.schema_of(op.inputs[0]).field(name) for name in names])


def compare_state(location: str, graph: Graph, oracle: KeyedOracle, story: str) -> int:
    """Compare all that is there with what the oracle remembers; how many entries there were."""
    count = 0
    for name, left in left_of(location, graph).items():
        found, wanted = found_of(graph, graph[name], left), wanted_of(oracle.operators[name], graph[name])
        assert found == wanted, f"state of {name}:\n  found  {found}\n  wanted {wanted}\n{story}"
        count += sum(map(len, wanted.values()))
    return count


def found_of(graph: Graph, op: Operator, left: Left) -> dict[str, Any]:
    match op.spec:
        case Process():
            return process_state(left)
        case Aggregate(window=None) as spec:
            return {"totals": running_totals(left, spec, graph.schema_of(op.inputs[0]))}
        case Aggregate():
            ends = left.timed(Namespace.WINDOW) | left.timed(Namespace.SESSION_END)
            return {"ends": ends, "keys": {left.key(stored) for stored, _ in left.of(Namespace.VALUE)}}
        case Distinct():
            keys = {left.key(stored) for stored, _ in left.of(Namespace.VALUE)}
            return {"keys": keys, "ends": left.timed(Namespace.EXPIRY)}
        case Join():
            return {side: left.timed(namespace) for side, namespace in WAITING.items()}
    raise AssertionError(op)


def wanted_of(told: Any, op: Operator) -> dict[str, Any]:
    match told:
        case Remembered():
            return {
                "values": {key: of.value[0] for key, of in told.keys.items() if of.value},
                "lists": {
                    (key, name): each for key, of in told.keys.items() for name, each in of.lists.items() if each
                },
                "items": {
                    (key, name, item): value
                    for key, of in told.keys.items()
                    for name, each in of.maps.items()
                    for item, value in each.items()
                },
                "timers": told.timers,
            }
        case Running():
            return {"totals": told.totals()}
        case Windows():
            return {"ends": {(end - told.offset, key) for key, end in told.open}, "keys": set()}
        case Sessions(_gap=gap):
            ends = {(one.last + gap, key) for key, each in told.open.items() for one in each}
            return {"ends": ends, "keys": set(told.open)}
        case Firsts():
            ends = {(end, key) for key, end in told.known.items() if end is not None}
            return {"keys": set(told.known), "ends": ends}
        case Pairs():
            assert isinstance(op.spec, Join)
            how, near = op.spec.how, Nearness.of(op.spec.window, op.spec.within_us, op.spec.after_us)
            left, right = told.waiting() if near.reach else (set(), set())
            return {
                "left": {(time + near.shift, key) for time, key in left} if how.keeps_left else set(),
                "right": right if how.keeps_right else set(),
            }
    raise AssertionError(told)


def process_state(left: Left) -> dict[str, Any]:
    codec = ObjectCodec("test")
    lists, items = {}, {}
    for stored, data in left.of(Namespace.LIST):
        key, name = split_item(stored)
        lists[left.key(key), name.decode()] = codec.decode(data, stored).value
    for stored, data in left.of(Namespace.MAP):
        key, item = split_item(stored)
        of_map, rest = item[1 : 1 + item[0]].decode(), item[1 + item[0] :]
        items[left.key(key), of_map, msgspec.msgpack.decode(rest)] = codec.decode(data, stored).value
    return {
        "values": {left.key(stored): codec.decode(data, stored).value for stored, data in left.of(Namespace.VALUE)},
        "lists": lists,
        "items": items,
        "timers": {
            (time, kind, key)
            for kind, namespace in ((EVENT, Namespace.EVENT_TIMER), (CLOCK, Namespace.CLOCK_TIMER))
            for time, key in left.timed(namespace)
        },
    }


def running_totals(left: Left, spec: Aggregate, takes: pa.Schema) -> dict[Key, dict[str, Any]]:
    entries = list(left.of(Namespace.VALUE))
    if not entries:
        return {}
    totals = TotalsOf(spec.columns, takes, "test", repr(spec.window))
    columns = [column.to_pylist() for column in totals.results(totals.unpack([data for _, data in entries])[0])]
    keys = [left.key(stored) for stored, _ in entries]
    names = [*spec.keys, *(name for name, _ in spec.columns)]
    rows = zip(keys, zip(*columns, strict=True), strict=True)
    return {key: dict(zip(names, (*key, *row), strict=True)) for key, row in rows}
