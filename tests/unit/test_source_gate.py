"""The gate at which a query waits for its log: who waits, who passes, and at which source."""

from __future__ import annotations

import os
import threading
from typing import Any

from midstream import Flow, ListSource, MemorySink
from midstream.flow.model import Graph
from midstream.runtime.spark.held_query import source_at_gate
from midstream.runtime.spark.source_gate import SourceGate, pass_gate

WAIT_S = 60.0


def test_a_reader_waits_until_the_gate_is_opened() -> None:
    gate, passed = SourceGate(), threading.Event()
    assert not gate.has_arrived(0.01)

    def read() -> None:
        pass_gate(gate.path)
        passed.set()

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    assert gate.has_arrived(WAIT_S)
    assert gate.has_arrived(0.0), "it is still there"
    assert not passed.wait(0.1)
    gate.open()
    assert passed.wait(WAIT_S)
    gate.open()
    pass_gate(gate.path)  # one that comes later
    assert not os.path.exists(gate.path)


def test_a_reader_that_the_driver_has_not_seen_passes_as_well() -> None:
    gate = SourceGate()
    reader = threading.Thread(target=pass_gate, args=(gate.path,), daemon=True)
    reader.start()
    gate.open()
    reader.join(WAIT_S)
    assert not reader.is_alive()


def graph_of(**streams: Any) -> Graph:
    flow = Flow("f")
    first, *others = [flow.source(name, stream) for name, stream in streams.items()]
    (first.union("all", *others) if others else first).sink("out", MemorySink())
    return flow.graph


def test_the_gate_is_in_front_of_the_first_source_that_may_have_a_memory() -> None:
    ours = ListSource([[{"n": 1}]], "n bigint")
    assert source_at_gate(graph_of(b=ours, a=ours)) == "b"
    both = graph_of(b=ours, a=ours)
    with_others = type("Read", (), {"payloads": {**both.payloads, "c": object(), "d": ours}, "sources": "abcd"})
    assert source_at_gate(with_others) == "b"  # type: ignore[arg-type]  # it reads no more than that
    without = type("Read", (), {"payloads": {"a": object(), "b": ours}, "sources": "ab"})
    assert source_at_gate(without) is None  # type: ignore[arg-type]
