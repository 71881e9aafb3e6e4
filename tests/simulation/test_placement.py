"""Several executors, each with its own base: partitions stick to them, bins are loaded ahead and freed, and whatever
happens to executors and messages, results are those of a plain count.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from midstream import Flow, ListSource, MemorySink
from midstream.control.messages import PrefetchRequest
from midstream.errors import FlowError
from midstream.flow.model import Source
from midstream.ids import BinId, Epoch, ExecutorId, PartitionId, StageIndex
from midstream.planner.assignment import spread
from midstream.runtime.local.data import source_epochs
from midstream.runtime.local.run import Faults
from midstream.runtime.local.runtime import run_graph, runtime_of
from midstream.state.lineage import Lineage
from midstream.state.retirement import GRACE_EPOCHS, Retirement
from midstream.testing import run_local

pytestmark = pytest.mark.long

STAGE = StageIndex(1)
PARTITIONS = 5
KEYS = 60
COUNT = Lineage.start("count")
FAST = 1 << 40


def count(key: Any, row: Any, state: Any) -> dict[str, Any]:
    state.set(state.get(0) + 1)
    return {**row, "count": state.get()}


def flow_of(epochs: int, keys: Callable[[int], range] = lambda epoch: range(KEYS)) -> tuple[Flow, MemorySink]:
    data = [[{"user": n, "epoch": epoch} for n in keys(epoch)] for epoch in range(epochs)]
    flow, out = Flow("placed"), MemorySink()
    rows = flow.source("rows", ListSource(data, "user bigint, epoch bigint"))
    rows.key_by("by user", "user").process("count", count, returns="user bigint, epoch bigint, count bigint").sink(
        "out", out
    )
    return flow, out


def expected(epochs: int) -> Counter[tuple[int, int, int]]:
    return Counter((n, epoch, epoch + 1) for n in range(KEYS) for epoch in range(epochs))


def found(out: MemorySink) -> Counter[tuple[int, int, int]]:
    return Counter((row["user"], row["epoch"], row["count"]) for row in out.rows)


def run_epochs(runtime: Any, flow: Flow, then: Callable[[int], None]) -> None:
    """Run all epochs; after each, call ``then``."""
    assert flow.graph.of(Source)
    for epoch, rows in enumerate(source_epochs(flow.graph)):
        runtime.run_epoch(Epoch(epoch), rows)
        then(epoch)


def owned(runtime: Any) -> dict[str, frozenset[BinId]]:
    """By executor: the bins that its partitions own, by the last commit."""
    assignment = spread(PARTITIONS)
    bins: dict[str, set[BinId]] = {executor.name: set() for executor in runtime.executors.all}
    for partition, name in runtime.placement.of(STAGE).items():
        bins[name] |= set(assignment.owned_by(partition))
    return {name: frozenset(numbers) for name, numbers in bins.items()}


def held(runtime: Any) -> dict[str, frozenset[BinId]]:
    return {executor.name: executor.state.held(Lineage.start("count")) for executor in runtime.executors.all}


def requests_for(places: Mapping[PartitionId, ExecutorId], bytes_per_s: int = FAST) -> list[PrefetchRequest]:
    """What a migration to these places loads ahead."""
    return [
        PrefetchRequest(
            name,
            STAGE,
            tuple(number for partition, at in places.items() if at == name for number in owners(partition)),
            bytes_per_s,
        )
        for name in sorted(set(places.values()))
    ]


def owners(partition: PartitionId) -> tuple[BinId, ...]:
    return spread(PARTITIONS).owned_by(partition)


def test_partitions_stay_where_they_are_and_hosts_hold_what_they_own():
    flow, out = flow_of(6)
    seen = []
    with runtime_of(flow.graph, partitions=PARTITIONS, executors=3, seed=4) as runtime:

        def check(epoch: int) -> None:
            seen.append(runtime.placement.of(STAGE))
            assert {name: bins & owned(runtime)[name] for name, bins in held(runtime).items()} == held(runtime)

        run_epochs(runtime, flow, check)
        shares = runtime.placement.shares({STAGE: spread(PARTITIONS)}, runtime.executors.names)
    assert [places for places in seen if places != seen[0]] == []
    assert len(set(seen[0].values())) > 1
    assert sum(share.bins.get(STAGE, 0) for share in shares) == 256
    assert found(out) == expected(6)


def test_after_partitions_have_moved_hosts_free_their_bins_but_not_at_once():
    flow, out = flow_of(10)
    after: list[bool] = []
    with runtime_of(flow.graph, partitions=PARTITIONS, executors=3, seed=4) as runtime:
        before: dict[PartitionId, ExecutorId] = {}

        def move(epoch: int) -> None:
            if epoch == 2:
                before.update(runtime.placement.of(STAGE))
                while runtime.propose_places(PARTITIONS) == before:
                    pass
                runtime.adopt_places(PARTITIONS)
            if epoch > 2:
                assert runtime.placement.of(STAGE) != before
                after.append(all(bins <= owned(runtime)[name] for name, bins in held(runtime).items()))

        run_epochs(runtime, flow, move)
    assert after[:GRACE_EPOCHS] == [False] * GRACE_EPOCHS, "they may come back at once"
    assert after[-1], "each host has only what it owns"
    assert found(out) == expected(10)


def test_bins_of_other_partitions_on_the_executor_stay_even_without_a_grace():
    flow, out = flow_of(6)
    with runtime_of(flow.graph, partitions=PARTITIONS, executors=2, seed=4) as runtime:
        for executor in runtime.executors.all:
            executor.retirement = Retirement(grace=0)
        run_epochs(runtime, flow, lambda epoch: None)
        read = [progress.state_read for progress in runtime._progress]
    assert found(out) == expected(6)
    assert max(read[2:]) == min(read[2:]) > 0, "only the last deltas are read"


def moving(*, ahead: bool) -> list[int]:
    """Bytes that tasks read by epoch; with epoch 8, all partitions move. Ahead: bins were loaded before."""
    # In the first epochs there is much state; in the others few keys change.
    flow, out = flow_of(10, lambda epoch: range(2_000) if epoch < 3 else range(20))
    read: list[int] = []
    with runtime_of(flow.graph, partitions=PARTITIONS, executors=3, seed=1) as runtime:
        places: dict[PartitionId, ExecutorId] = {}

        def prepare(epoch: int) -> None:
            if epoch == 3:
                now = runtime.placement.of(STAGE)
                while any(places.get(partition, name) == name for partition, name in now.items()):
                    places.update(runtime.propose_places(PARTITIONS))
                if ahead:
                    runtime.prefetch(requests_for(places))
            if epoch == 7:
                for name in set(places.values()) if ahead else ():
                    warm = runtime.placement.warmth(name, STAGE)
                    assert warm.epoch == 6, "as it was when the last epoch began"
                    assert set(warm.bins) == {b for p, at in places.items() if at == name for b in owners(p)}
                    assert warm.bytes > 0
                runtime.adopt_places(PARTITIONS)
                runtime.prefetch([])
            if epoch == 8:
                assert runtime.placement.of(STAGE) == places

        run_epochs(runtime, flow, prepare)
        read += [progress.state_read for progress in runtime._progress]
    assert found(out) == Counter(
        (n, epoch, epoch + 1) for epoch in range(10) for n in (range(2_000) if epoch < 3 else range(20))
    )
    return read


def test_bins_that_were_loaded_ahead_leave_only_the_last_delta_to_read():
    ahead, at_once = moving(ahead=True), moving(ahead=False)
    assert ahead[8] == ahead[7], "no more than in an epoch in which nothing moves"
    assert at_once[8] > 10 * ahead[8]
    assert ahead[:8] == at_once[:8], "what is loaded ahead is not counted as read by tasks"


FAULTS = Faults(
    crash=0.02,
    speculate=0.02,
    repeat=0.2,
    give_up=0.003,
    lose_run=0.002,
    crash_driver=0.003,
    lose=0.3,
    lose_output=0.01,
    lose_executor=0.01,
)


@pytest.mark.parametrize("seed", range(12))
def test_results_are_exact_whatever_happens_to_executors_and_messages(seed: int):
    rng = random.Random(seed)
    flow, out = flow_of(8)
    with runtime_of(flow.graph, partitions=PARTITIONS, executors=3, seed=seed, faults=FAULTS) as runtime:

        def disturb(epoch: int) -> None:
            if rng.random() < 0.7:
                places = runtime.propose_places(PARTITIONS)
                if rng.random() < 0.8:  # sometimes of executors that were lost, and of bins that others own
                    runtime.prefetch(requests_for(places))
                if rng.random() < 0.5:
                    runtime.adopt_places(PARTITIONS)

        run_epochs(runtime, flow, disturb)
        lost = runtime.executors.names != {"0", "1", "2"}
    assert found(out) == expected(8)
    assert lost or seed, "the fault happens"


def test_a_seed_replays_exactly_with_executors_as_well():
    runs = []
    for _ in range(2):
        flow, out = flow_of(5)
        run = run_graph(flow.graph, partitions=PARTITIONS, executors=3, seed=9, faults=FAULTS)
        runs.append((run.story, out.rows))
    assert runs[0] == runs[1]


@pytest.mark.parametrize("executors", [0, -1, 1.5, True])
def test_a_number_of_executors_that_makes_no_sense_is_refused(executors: Any):
    flow, _ = flow_of(1)
    with pytest.raises(FlowError, match=r"executors=.*: give a whole number, 1 or more"):
        run_local(flow, executors=executors)


@pytest.mark.parametrize(
    ("stage", "bins", "bytes_per_s", "message"),
    [
        (0, (1,), 1, "cannot load ahead for stage 0: stages behind an exchange are 1"),
        (1, (1, 256), 1, "there is no bin 256; the bins of a stage are 0 to 255"),
        (1, (1,), 0, "cannot load ahead at 0 bytes a second; give 1 or more"),
    ],
)
def test_a_request_that_cannot_be_met_is_refused(stage: int, bins: tuple[int, ...], bytes_per_s: int, message: str):
    flow, _ = flow_of(1)
    request = PrefetchRequest(ExecutorId("0"), StageIndex(stage), tuple(map(BinId, bins)), bytes_per_s)
    with runtime_of(flow.graph, executors=2) as runtime:
        with pytest.raises(FlowError, match=message):
            runtime.prefetch([request])
        assert runtime.placement.requests == ()
