"""What moves the watermark and what does not, and how a finite run closes its windows."""

from __future__ import annotations

import logging
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from midstream import Flow, ListSource, MemorySink, NoopSink, agg, sessions, tumbling
from midstream.checkpoint.committed_state import CommittedState
from midstream.checkpoint.location import Checkpoint
from midstream.checkpoint.manifest import Manifest
from midstream.data.times import Watermarks
from midstream.errors import CheckpointError, FlowError, JobFailed
from midstream.ids import Digest, Epoch, Revision
from midstream.testing import ManualClock, run_local

Row = dict[str, Any]
START = datetime(2026, 1, 1, tzinfo=UTC)
DDL = "k string, t timestamp"


def at(seconds: float) -> datetime:
    return START + timedelta(seconds=seconds)


def us(time: datetime) -> int:
    return int(time.timestamp() * 1_000_000)


def rows_at(*seconds: float, k: str = "a") -> list[Row]:
    return [{"k": k, "t": at(each)} for each in seconds]


def windows(flow: Flow, *sources: Any, out: MemorySink, late: MemorySink | None = None) -> None:
    """Count rows in windows of ten seconds, over all sources."""
    [first, *others] = sources
    stream = first.union("all", *others) if others else first
    made = stream.key_by("by_k", "k").aggregate("count", window=tumbling("10 seconds"), n=agg.count())
    made.sink("out", out)
    made.late().sink("late", late or NoopSink())


def found(out: MemorySink) -> list[tuple[float, int]]:
    return sorted(((row["window_start"] - START).total_seconds(), row["n"]) for row in out.rows)


# ── times from the far future ─────────────────────────────────────────────────────────────────────────────────────


def ahead(max_ahead: Any, *, clock: int = us(START)) -> tuple[list[tuple[float, int]], int, int]:
    """The closed windows, the late rows, and the rows that were ahead, if one row is from next year."""
    flow, out, late = Flow("f"), MemorySink(), MemorySink()
    epochs = [rows_at(1, 400 * 86400), rows_at(2), rows_at(12)]
    options = {} if max_ahead == "default" else {"max_ahead": max_ahead}
    windows(flow, flow.source("in", ListSource(epochs, DDL, event_time="t"), **options), out=out, late=late)
    run = run_local(flow, clock=ManualClock(clock))
    [source] = [stats for stats in run.metrics.operators if stats.operator == "in"]
    return found(out), len(late.rows), source.rows_ahead


def test_an_event_time_in_the_far_future_does_not_move_the_watermark():
    assert ahead("default") == ([(0, 2)], 0, 1)
    assert ahead("300 days") == ([(0, 2)], 0, 1)


def test_an_event_time_in_the_future_moves_the_watermark_if_allowed():
    assert ahead(None) == ([(0, 1)], 2, 0)
    assert ahead("500 days") == ([(0, 1)], 2, 0)


def test_replays_of_the_past_are_not_ahead():
    assert ahead("default", clock=us(at(500 * 86400))) == ([(0, 1)], 2, 0)


def test_rows_ahead_of_the_clock_are_processed_and_logged_once(caplog: pytest.LogCaptureFixture):
    flow, out = Flow("f"), MemorySink()
    epochs = [rows_at(1, 400 * 86400), rows_at(2, 400 * 86400), rows_at(12)]
    stream = flow.source("in", ListSource(epochs, DDL, event_time="t"))
    stream.map("same", lambda row: row).sink("out", out)
    with caplog.at_level(logging.WARNING, "midstream"):
        run_local(flow, clock=ManualClock(us(START)))
    assert len(out.rows) == 5
    assert [record.getMessage() for record in caplog.records] == [
        "source 'in': the event times of 1 row(s) of epoch 0 are further ahead of the clock than max_ahead allows; "
        "such rows are processed, but do not move the watermark"
    ]


def test_a_bound_must_be_a_length_of_time():
    flow = Flow("f")
    with pytest.raises(FlowError, match="source 'in': max_ahead='soon' is not a length of time"):
        flow.source("in", ListSource([[]], DDL, event_time="t"), max_ahead="soon")


# ── idle sources ──────────────────────────────────────────────────────────────────────────────────────────────────


BIDS = [rows_at(1), rows_at(12), rows_at(25), rows_at(31)]
ASKS = [rows_at(2), [], [], rows_at(14, 32)]
PLANNED_AT = (0, 10, 20, 21)


def two_sources(bids: list[list[Row]], asks: list[list[Row]], idle: str | None, **sinks: MemorySink) -> Flow:
    flow = Flow("f")
    first = flow.source("bids", ListSource(bids, DDL, event_time="t"))
    second = flow.source("asks", ListSource(asks, DDL, event_time="t"), idle=idle)
    windows(flow, first, second, **sinks)
    return flow


def silent(asks: list[list[Row]], idle: str | None, checkpoint: Path) -> tuple[MemorySink, MemorySink]:
    """Windows and late rows. Every epoch is a separate start, so all relevant state must be in the checkpoint."""
    out, late = MemorySink(), MemorySink()
    for epoch, second in enumerate(PLANNED_AT):
        flow = two_sources([BIDS[epoch]], [asks[epoch]], idle, out=out, late=late)
        run_local(flow, clock=ManualClock(us(at(second))), checkpoint=str(checkpoint))
    return out, late


def test_by_default_windows_wait_for_every_source(tmp_path: Path):
    out, late = silent(ASKS, None, tmp_path / "checkpoint")
    assert (found(out), late.rows) == ([(0, 2), (10, 2), (20, 1)], [])
    assert [epoch for epoch, table in out.tables.items() if table.num_rows] == [3]


def test_an_idle_source_does_not_hold_back_windows_forever(tmp_path: Path):
    out, late = silent(ASKS, "20 seconds", tmp_path / "checkpoint")
    # In the third epoch the asks have been silent for 20 seconds; their older rows are late.
    assert [epoch for epoch, table in out.tables.items() if table.num_rows] == [2, 3]
    assert found(out) == [(0, 2), (10, 1), (20, 1)]
    assert [row["t"] for row in late.rows] == [at(14)]


def test_a_source_that_has_never_produced_a_row_can_be_idle(tmp_path: Path):
    out, _ = silent([[], [], [], []], "20 seconds", tmp_path / "checkpoint")
    assert found(out) == [(0, 1), (10, 1), (20, 1)]


def test_an_idle_timeout_needs_another_source():
    flow = Flow("f")
    stream = flow.source("in", ListSource([[]], DDL, event_time="t"), idle="30 seconds")
    stream.sink("out", NoopSink())
    with pytest.raises(FlowError, match="source 'in': idle= lets the watermark follow the other sources, but no other"):
        run_local(flow)
    with pytest.raises(FlowError, match="idle='30 seconds' needs event_time="):
        flow.source("other", ListSource([[]], DDL), idle="30 seconds")


@given(
    delays=st.lists(st.integers(0, 5), min_size=1, max_size=3),
    idle=st.lists(st.none() | st.integers(1, 20), min_size=3, max_size=3),
    epochs=st.lists(
        st.tuples(st.integers(0, 10), st.dictionaries(st.integers(0, 2), st.integers(0, 100))), max_size=12
    ),
)
def test_the_watermark_is_that_of_the_slowest_active_source_and_never_goes_back(
    delays: list[int], idle: list[int | None], epochs: list[tuple[int, dict[int, int]]]
) -> None:
    names = [str(number) for number in range(len(delays))]
    marks = Watermarks(
        dict(zip(names, delays, strict=True)),
        {name: limit for name, limit in zip(names, idle, strict=False) if limit is not None},
    )
    clock, seen, spoke = 1000, dict[str, list[int]](), dict[str, int]()
    reached: list[int] = []
    for step, rows in epochs:
        clock += step
        given_rows = {str(name): time for name, time in rows.items() if str(name) in names}
        for name in names:
            spoke.setdefault(name, clock)
        for name, time in given_rows.items():
            seen.setdefault(name, []).append(time)
            spoke[name] = clock
        marks = marks.after(given_rows, clock)
        counted = [name for name in names if name not in marks.idle or clock - spoke[name] < marks.idle[name]]
        if counted and all(name in seen for name in counted):
            reached.append(min(max(seen[name]) - marks.delays[name] for name in counted))
        assert marks.watermark == (max(reached) if reached else None)


def test_a_longer_delay_in_the_script_does_not_move_the_watermark_back(tmp_path: Path):
    for delay, wanted in (("0 seconds", at(30)), ("20 seconds", at(30))):
        flow = Flow("f")
        stream = flow.source("in", ListSource([rows_at(30)], DDL, event_time="t"), delay=delay)
        windows(flow, stream, out=MemorySink())
        run_local(flow, checkpoint=str(tmp_path / "checkpoint"))
        newest = Checkpoint.of_any_flow(str(tmp_path / "checkpoint")).newest_manifest()
        assert newest is not None
        assert newest.watermark == us(wanted)


def test_the_watermark_of_an_older_manifest_is_derived_from_its_event_times():
    flow = two_sources([[]], [[]], None, out=MemorySink())
    old = Manifest(Epoch(3), Revision(1), (), Digest(""), 0.0, {}, event_times={"bids": 50, "asks": 40})
    assert CommittedState.of(flow.graph, old).watermarks.watermark == 40
    half = Manifest(Epoch(3), Revision(1), (), Digest(""), 0.0, {}, event_times={"bids": 50})
    assert CommittedState.of(flow.graph, half).watermarks.watermark is None


# ── the end of a finite run ───────────────────────────────────────────────────────────────────────────────────────


class Beat:
    """A timer that always sets another one."""

    def __call__(self, key: str, row: Row, state: Any) -> None:
        state.event_timer(row["t"] + timedelta(hours=1))

    def on_timer(self, key: str, time: datetime, state: Any) -> Row:
        state.event_timer(time + timedelta(hours=1))
        assert state.watermark.year == 9999
        return {"k": key, "t": time}


def finite(**sinks: MemorySink) -> Flow:
    flow = Flow("finite")
    stream = flow.source("in", ListSource([rows_at(1, 2), rows_at(11, 25)], DDL, event_time="t"))
    keyed = stream.key_by("by_k", "k")
    keyed.aggregate("count", window=tumbling("10 seconds"), n=agg.count()).sink("windows", sinks["windows"])
    keyed.aggregate("visits", window=sessions("5 seconds"), n=agg.count()).sink("sessions", sinks["sessions"])
    keyed.process("beat", Beat()).sink("timers", sinks["timers"])
    other = stream.map("right", lambda row: {"rk": "b", "rt": row["t"]}, returns="rk string, rt timestamp")
    joined = keyed.join("pairs", other.key_by("by_rk", "rk"), within="1 hour", how="left", right_time="rt")
    joined.sink("pairs out", sinks["pairs"])
    return flow


@pytest.mark.parametrize("close", [False, True])
def test_a_finite_run_can_close_its_last_windows(close: bool):
    sinks = {name: MemorySink() for name in ("windows", "sessions", "timers", "pairs")}
    run = run_local(finite(**sinks), close_windows=close)
    assert [progress.epoch for progress in run.progress] == [0, 1, 2][: 2 + close]
    assert found(sinks["windows"]) == [(0, 2), (10, 1), (20, 1)][: 2 + close]
    assert [row["n"] for row in sinks["sessions"].rows] == [2, 1, 1][: 2 + close]
    assert len(sinks["timers"].rows) == len(sinks["pairs"].rows) == 4 * close


def test_a_closed_checkpoint_is_refused(tmp_path: Path):
    checkpoint = str(tmp_path / "checkpoint")
    flow, out = Flow("f"), MemorySink()
    windows(flow, flow.source("in", ListSource([rows_at(1)], DDL, event_time="t")), out=out)
    run_local(flow, checkpoint=checkpoint, close_windows=True)
    assert found(out) == [(0, 1)]
    with pytest.raises(
        CheckpointError, match=r"closed by its last run \(close_windows=True, epoch 1\).* new checkpoint"
    ):
        run_local(flow, checkpoint=checkpoint)


def test_a_run_that_dies_before_it_has_closed_its_windows_continues(tmp_path: Path):
    checkpoint, out, late = str(tmp_path / "checkpoint"), MemorySink(), MemorySink()

    def flow_of(epochs: list[list[Row]]) -> Flow:
        flow = Flow("f")
        windows(flow, flow.source("in", ListSource(epochs, DDL, event_time="t")), out=out, late=late)
        return flow

    commit = Checkpoint.commit

    def dies(self: Checkpoint, manifest: Manifest) -> None:
        if manifest.closing:
            raise OSError("no power")
        commit(self, manifest)

    with patch.object(Checkpoint, "commit", dies), pytest.raises((JobFailed, OSError), match="no power"):
        run_local(flow_of([rows_at(1)]), checkpoint=checkpoint, close_windows=True)
    assert found(out) == [(0, 1)], "the sink has been told of it"
    run_local(flow_of([rows_at(2), rows_at(3, 12)]), checkpoint=checkpoint, close_windows=True)
    assert {epoch: table.num_rows for epoch, table in out.tables.items()} == {0: 0, 1: 0, 2: 1, 3: 1}
    assert found(out) == [(0, 3), (10, 1)], "epoch 1 was replaced"
    assert late.rows == []
