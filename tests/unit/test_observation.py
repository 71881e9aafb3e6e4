"""Observations: what they say equals an independent count, whoever reads them; readers never hold up the job."""

from __future__ import annotations

import random
import re
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text
from rich.console import Console
from typer.testing import CliRunner

from midstream import Flow, ListSource, MemorySink, Observation, agg
from midstream.checkpoint.inspection import StateReader, read_state
from midstream.cli.app import app
from midstream.cli.top import screen
from midstream.engine.key_sampler import LOOKED_AT, KeySampler
from midstream.metrics import HEAVY_KEYS, HeavyKeys, Histogram, JobMetrics, OperatorStats
from midstream.observation import OperatorObservation, SourceObservation
from midstream.runtime.watch import KEPT, Watches
from midstream.server.exposition import FAMILIES, OPENMETRICS, TEXT, exposition
from midstream.testing import ManualClock, run_local
from tests.examples import examples
from tests.served import StandInJob, served
from tests.unit.test_server import ask

DOCS = Path(__file__).parents[2] / "docs"

# ── heavy keys ────────────────────────────────────────────────────────────────────────────────────────────────────


@examples(60)
@given(st.lists(st.lists(st.integers(0, 80)), min_size=1, max_size=6))
def test_counts_are_never_too_high_and_too_low_by_what_was_missed_at_most(tasks):
    """However the rows are spread over tasks, and in which order the tasks are added up."""
    exact = Counter(key for keys in tasks for key in keys)
    parts = [HeavyKeys.of({str(key): count for key, count in Counter(keys).items()}, len(keys)) for keys in tasks]
    random.Random(len(tasks)).shuffle(parts)
    found = sum(parts, HeavyKeys())
    assert found.rows == exact.total()
    assert len(found.counts) <= HEAVY_KEYS
    for key in {*exact, *map(int, found.counts)}:
        assert exact[key] - found.missed <= found.counts.get(str(key), 0) <= exact[key]
    assert found.missed <= found.rows / (HEAVY_KEYS + 1)
    assert list(found.counts.values()) == sorted(found.counts.values(), reverse=True)


def test_a_sampler_counts_small_slices_exactly_and_estimates_large_ones():
    rng = random.Random(3)
    small, large, exact = KeySampler(["k", "m"]), KeySampler(["k", "m"]), Counter[str]()
    for number in range(300):
        keys = [0 if rng.random() < 0.3 else rng.randrange(1, 3000) for _ in range(500)]
        exact.update(f"{key}, 'x'" for key in keys)
        batch = pa.record_batch({"k": keys, "m": ["x"] * 500})
        large.note(batch, 1_000_000 * number)  # one slice in three is looked at
        for start in range(0, 500, LOOKED_AT):
            small.note(batch.slice(start, LOOKED_AT), 10**7 * (1000 * number + start))
    for sampler, tolerance in ((small, 0.0), (large, 0.03)):
        found = sampler.found()
        assert found.rows == 150_000
        assert found.heaviest is not None
        key, _ = found.heaviest
        assert key == "0, 'x'"
        slack = 1 + tolerance * found.rows  # counts are rounded
        assert exact[key] - found.missed - slack <= found.counts[key] <= exact[key] + slack
        assert found.missed < 0.05 * found.rows


def test_rows_since_the_last_sample_are_taken_to_be_like_those_before():
    sampler = KeySampler(["k"])
    for _ in range(10):
        sampler.note(pa.record_batch({"k": ["a", "a", "b"]}), 0)
    assert sampler.found() == HeavyKeys(30, {"'a'": 20, "'b'": 10})


def test_long_keys_and_nulls_are_counted_within_bounds():
    sampler = KeySampler(["k"])
    sampler.note(pa.record_batch({"k": ["x" * 10_000, None, None]}), 0)
    counts = sampler.found().counts
    assert counts["None"] == 2
    assert max(map(len, counts)) == 80


# ── an epoch ──────────────────────────────────────────────────────────────────────────────────────────────────────


def observed(tmp_path: Path, epochs: int = 3, seed: int = 0) -> tuple[Observation, ...]:
    rows = [
        [{"k": "hot" if i % 2 else f"k{i}", "n": i, "t": 1_000_000 * epoch} for i in range(20)]
        for epoch in range(epochs)
    ]
    flow = Flow("seen")
    stream = flow.source("in", ListSource(rows, "k string, n int, t timestamp", event_time="t"))
    kept = stream.filter("keep", lambda row: row["n"] > 1).key_by("by_k", "k")
    kept.aggregate("sum", n=agg.sum("n")).sink("out", MemorySink())
    clock = ManualClock(start_us=10_000_000)
    return run_local(flow, checkpoint=str(tmp_path / "job"), seed=seed, clock=clock).observations


@pytest.mark.parametrize("seed", range(3))
def test_an_observation_equals_a_count_by_hand(tmp_path, seed):
    seen = observed(tmp_path, seed=seed)
    assert [each.epoch for each in seen] == [0, 1, 2]
    last = seen[-1]
    found = {each.operator: each for each in last.operators}
    assert (last.flow, last.rows_in, last.rows_out, last.totals.rows_in, last.totals.epochs) == ("seen", 20, 10, 60, 3)
    assert [(each.rows_in, each.rows_out) for each in (found["keep"], found["by_k"])] == [(20, 18), (18, 18)]
    assert found["by_k"].heavy_keys.heaviest == ("'hot'", 0.5)
    assert sum(found["by_k"].heavy_keys.counts.values()) == 18
    # The files in the checkpoint, and the keys that are in them, are counted by others.
    [held] = StateReader.at(str(tmp_path / "job")).overview()
    keys = read_state(str(tmp_path / "job"), "sum").num_rows
    assert (found["sum"].state_bytes, found["sum"].state_files) == (held.nbytes, held.files)
    assert keys == 10
    assert keys <= found["sum"].keys_at_most <= 3 * keys
    [source] = last.sources
    assert (source.source, source.rows, source.backlog) == ("in", 20, {})
    assert source.behind_ms == pytest.approx(8000, abs=100), "the clock stands at 10 s, the last event at 2 s"
    assert found["keep"].latency_p50_ms is not None
    assert 7900 < found["keep"].latency_p50_ms < 1.2 * 8100
    assert last.worker_memory_bytes > 1 << 20
    assert last.driver_memory_bytes > 1 << 20


def test_shares_are_of_the_time_between_two_commits():
    seen = observation(duration_ms=200.0, elapsed_ms=400.0, rows_in=1000)
    assert (seen.rows_per_s, seen.utilisation) == (2500.0, 0.5)
    assert observation(elapsed_ms=0.0).rows_per_s == 0.0


def test_every_field_is_documented():
    page = (DOCS / "operating.md").read_text(encoding="utf-8")
    for kind in (Observation, OperatorObservation, SourceObservation):
        for name in kind.__struct_fields__:
            assert f"`{name}`" in page, f"{kind.__name__}.{name}"


# ── watching ──────────────────────────────────────────────────────────────────────────────────────────────────────


def observation(epoch: int = 0, **fields: Any) -> Observation:
    return Observation(flow="fraud", job="0123", revision=1, epoch=epoch, observed_at=1.0, **fields)


def test_a_watch_gives_each_epoch_and_ends_with_the_job():
    watches = Watches()
    watches.put(observation(0))
    watch, other = watches.watch(), watches.watch()
    found: list[int] = []
    reader = threading.Thread(target=lambda: found.extend(each.epoch for each in watch))
    reader.start()
    for epoch in range(1, 5):
        watches.put(observation(epoch))
    watches.end()
    reader.join(60)
    assert found == [1, 2, 3, 4]
    assert [each.epoch for each in other] == [1, 2, 3, 4]
    assert list(watches.watch()) == [], "a job that is over"
    assert watches.last is not None
    assert watches.last.epoch == 4


def test_a_slow_reader_loses_the_oldest_observations_and_learns_how_many():
    watches = Watches()
    with watches.watch() as slow:
        for epoch in range(KEPT + 7):
            watches.put(observation(epoch))
        assert slow.dropped == 7
        assert next(slow).epoch == 7
    watches.put(observation(1000))
    assert [each.epoch for each in slow] == list(range(8, KEPT + 7)), "closed, so nothing more comes"


# ── Prometheus ────────────────────────────────────────────────────────────────────────────────────────────────────

ODD = 'a "b"\\c\nd'


def full() -> Observation:
    stats = OperatorStats(
        "FM",
        rows_in=1000,
        rows_out=990,
        rows_late=3,
        errors=7,
        busy_us=2_500_000,
        latency_ms=Histogram.of([(0.5, 10), (1.0, 5), (30.0, 80), (5_000.0, 5), (1e9, 1)]),
    )
    source = OperatorStats("in", rows_in=1000, rows_out=1000, rows_ahead=4)
    return observation(
        7,
        is_on_trial=True,
        duration_ms=250.0,
        elapsed_ms=500.0,
        rows_in=500,
        rows_out=400,
        tasks=4,
        worker_memory_bytes=300 << 20,
        driver_memory_bytes=200 << 20,
        operators=(
            OperatorObservation(operator="FM", kind="map", rows_in=500, rows_out=495, busy_ms=900.0, busy_share=1.8),
            OperatorObservation(
                operator=ODD,
                kind="key_by",
                state_bytes=5000,
                state_files=2,
                keys_at_most=44,
                heavy_keys=HeavyKeys.of({"'ann'": 300}, 500),
            ),
        ),
        sources=(SourceObservation(source="in", rows=500, behind_ms=1500.0, backlog={"maxOffsetsBehindLatest": 3.0}),),
        totals=JobMetrics(epochs=2, rows_in=1000, rows_out=900, busy_ms=600.0, operators=(source, stats)),
    )


@pytest.mark.parametrize("openmetrics", [False, True])
def test_an_independent_parser_reads_the_metrics(openmetrics):
    text = exposition("fraud", "0123", full(), openmetrics=openmetrics)
    families = list((parse_openmetrics if openmetrics else parse_text)(text))
    values = {
        (sample.name, tuple(v for k, v in sample.labels.items() if k not in ("flow", "version", "le"))): sample.value
        for family in families
        for sample in family.samples
    }
    assert all(sample.labels["flow"] == "fraud" for family in families for sample in family.samples)
    for name, labels, value in (
        ("midstream_job_info", ("0123",), 1),
        ("midstream_epochs_total", (), 2),
        ("midstream_rows_in_total", (), 1000),
        ("midstream_epoch_time_seconds_total", (), 0.6),
        ("midstream_epoch", (), 7),
        ("midstream_change_on_trial", (), 1),
        ("midstream_epoch_elapsed_seconds", (), 0.5),
        ("midstream_worker_memory_bytes", (), 300 << 20),
        ("midstream_operator_rows_in_total", ("FM",), 1000),
        ("midstream_operator_rows_bad_total", ("FM",), 7),
        ("midstream_operator_busy_seconds_total", ("FM",), 2.5),
        ("midstream_operator_busy_ratio", ("FM",), 1.8),
        ("midstream_operator_state_bytes", (ODD,), 5000),
        ("midstream_operator_keys_limit", (ODD,), 44),
        ("midstream_operator_heaviest_key_ratio", (ODD,), 0.6),
        ("midstream_source_rows_ahead_total", ("in",), 4),
        ("midstream_source_behind_seconds", ("in",), 1.5),
        ("midstream_source_backlog", ("in", "maxOffsetsBehindLatest"), 3),
        ("midstream_operator_latency_seconds_count", ("FM",), 101),
    ):
        assert values[name, labels] == value, name
    [latency] = [family for family in families if family.name == "midstream_operator_latency_seconds"]
    counts = {s.labels["le"]: s.value for s in latency.samples if s.name.endswith("_bucket")}
    assert (latency.type, counts["0.001"], counts["0.032"], counts["8.192"], counts["+Inf"]) == (
        "histogram",
        15,
        95,
        100,
        101,
    )
    assert list(counts.values()) == sorted(counts.values())
    assert "ann" not in text, "keys are data, and never go into labels"
    assert text.endswith("# EOF\n") is openmetrics


def test_before_the_first_epoch_the_metrics_only_name_the_job():
    [family] = parse_openmetrics(exposition("fraud", "0123", None, openmetrics=True))
    assert family.samples[0].labels["job"] == "0123"


def test_all_families_are_documented():
    page = (DOCS / "operating.md").read_text(encoding="utf-8")
    told = set(re.findall(r"^\| `(midstream_\w+)` \|", page, re.MULTILINE))
    written = {family.name + {"counter": "_total", "info": "_info"}.get(family.kind, "") for family in FAMILIES}
    assert told == written
    text = exposition("fraud", "0123", full())
    assert all(f"# TYPE {name} " in text for name in written), "each is in the example"


# ── served ────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def job(tmp_path, monkeypatch):
    monkeypatch.setenv("MIDSTREAM_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("COLUMNS", "80")
    return StandInJob(tmp_path)


def test_the_metrics_are_served_in_the_format_that_is_asked_for(job):
    job.observation = full()
    with served(job) as server:
        for accept, kind in (("text/plain", TEXT), ("application/openmetrics-text; version=1.0.0", OPENMETRICS)):
            status, headers, body = ask(
                server, "GET", "/metrics", headers={"Authorization": f"Bearer {server.token}", "Accept": accept}
            )
            assert (status, headers["content-type"]) == (200, kind)
            assert b"midstream_epochs_total" in body
        assert ask(server, "GET", "/metrics", headers={})[0] == 401
        status, _, body = ask(server, "GET", "/observation")
        assert msgspec.json.decode(body, type=Observation) == full()


def test_top_shows_one_screen_of_80_columns(job):
    job.observation = full()
    with served(job):
        result = CliRunner().invoke(app, ["top", "fraud", "--once"])
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0] == "fraud  epoch 7  revision 1  change on trial"
    assert lines[1].startswith("1,000 rows/s  250 ms of 500 (50%)  4 tasks  workers 314.6 MB  driver 209.7 MB")
    [busy] = [line for line in lines if line.startswith("FM")]
    assert busy.split()[:4] == ["FM", "1000", "990", "1.80"]
    assert lines[-1] == "source in: 500 rows, 1.5 s behind, maxOffsetsBehindLatest 3"
    assert "'ann' 60%" in result.output


def test_top_before_the_first_epoch(job):
    with served(job):
        result = CliRunner().invoke(app, ["top", "fraud", "--once"])
    assert (result.exit_code, result.output) == (0, "no epoch has been committed since the job was started\n")
    assert CliRunner().invoke(app, ["top", "nobody"]).exit_code != 0


@pytest.mark.parametrize("height", [12, 24])
def test_a_screen_shows_the_busiest_operators_that_fit(height):
    many = tuple(
        OperatorObservation(operator=f"operator with a long name {i}", kind="map", busy_share=i / 10, rows_in=10**7)
        for i in range(50)
    )
    console = Console(width=80, height=height, record=True)
    console.print(screen(observation(operators=many, elapsed_ms=100.0), height))
    lines = console.export_text().splitlines()
    assert len(lines) <= height
    assert max(map(len, lines)) <= 80
    assert "4.90" in console.export_text(clear=False) or any("4.90" in line for line in lines)
