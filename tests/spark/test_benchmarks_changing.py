"""Small versions of the experiments on live changes, and of NEXMark, run and print their results."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from examples.kafka import jars
from tests.spark.conftest import ROOT

pytestmark = [pytest.mark.spark, pytest.mark.cluster]

PATIENCE_S = 900


def run_quick(name: str, plot: Path) -> dict[str, Any]:
    """The last line of a benchmark, which starts its own drivers."""
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    ended = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{name}", "--quick", "--plot", str(plot)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path, "PYSPARK_PYTHON": sys.executable},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-5000:]
    figures: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    assert (figures["benchmark"], figures["quick"]) == (name, True)
    assert plot.read_text().startswith("<?xml")
    return figures


@pytest.mark.timeout(PATIENCE_S)
def test_fries_compares_schedulers_and_restarts(tmp_path: Path) -> None:
    figures = run_quick("fries", tmp_path / "fries.svg")
    found = {(row["workload"], row["updated"], row["scheduler"]): row for row in figures["rows"]}
    assert {("W1", "FD", "fries"), ("W2", "J1", "epoch"), ("W5", "E1", "fries-unpruned")} <= set(found)
    assert all(row["changes"] >= 1 and row["delay_ms"]["max"] >= row["delay_ms"]["median"] for row in found.values())
    assert (figures["violations"], figures["audited_changes"] >= 7) == (0, True)
    # A busy machine may be slow, but a change must not take as long as an epoch or a restart.
    fries, epoch = (found["W1", "FD", scheduler]["delay_ms"]["median"] for scheduler in ("fries", "epoch"))
    assert fries < max(epoch, figures["restart_same_driver_ms"])
    assert figures["restart_same_driver_ms"] < figures["redeploy_ms"] < figures["redeploy_committed_ms"]
    assert figures["idle_overhead_ratio"] > 0, "what it is on a quiet machine is in the docs"


@pytest.mark.timeout(PATIENCE_S)
def test_delay_has_a_point_for_each_setting(tmp_path: Path) -> None:
    figures = run_quick("delay", tmp_path / "delay.svg")
    assert {point["figure"] for point in figures["points"]} == {"rate", "cost", "workers"}
    assert all(point["fries_ms"] > 0 and point["epoch_ms"] > 0 for point in figures["points"])


@pytest.mark.timeout(PATIENCE_S)
def test_surge_follows_latency_with_and_without_changes(tmp_path: Path) -> None:
    figures = run_quick("surge", tmp_path / "surge.svg")
    assert list(figures["runs"]) == ["no change", "epoch", "fries"]
    assert [len(run["delays_ms"]) for run in figures["runs"].values()] == [0, 2, 2]
    for course in figures["courses"].values():
        times = [at for at, _ in course]
        assert times == sorted(times)
        assert all(latency > 0 for _, latency in course)


@pytest.mark.timeout(PATIENCE_S)
def test_migration_moves_half_of_the_state_in_several_ways_and_counts_every_row_once(tmp_path: Path) -> None:
    figures = run_quick("migration", tmp_path / "migration.svg")
    assert (figures["lost"], figures["doubled"]) == (0, 0)
    runs = figures["runs"]
    assert {name: run["bins"] for name, run in runs.items()} == {
        "sudden": 16,
        "fluid": 16,
        "sudden, pre-warmed": 16,
        "budgeted, pre-warmed": 16,
        "stop and start": 0,
        "stop and start, local state lost": 0,
    }
    assert (runs["sudden"]["steps"], runs["fluid"]["steps"], runs["sudden, pre-warmed"]["steps"]) == (1, 16, 1)
    assert runs["sudden"]["read_bytes"] > runs["sudden, pre-warmed"]["read_bytes"], "what was loaded ahead"
    # A busy machine may be slow, but no row is served before it is due.
    assert all(run["max_ms"] >= run["p99_ms"] > 0 and run["steady_max_ms"] > 0 for run in runs.values())
    assert figures["restart_over_prewarmed"] > 0


@pytest.mark.timeout(PATIENCE_S)
def test_a_square_wave_is_served_while_a_job_is_scaled_out_and_in(tmp_path: Path) -> None:
    figures = run_quick("square_wave", tmp_path / "square_wave.svg")
    assert (figures["lost"], figures["doubled"]) == (0, 0)
    assert 0 < figures["low"] < figures["high"]
    assert list(figures["runs"]) == ["out", "in"]
    for found in figures["runs"].values():
        assert found["batched"]["steps"] == 4, "two pairs of partitions, eight bins"
        assert len({run["bytes"] > 0 for run in found.values()}) == 1
        assert all(run["max_ms"] >= run["p99_ms"] > 0 for run in found.values())
    assert figures["adaptive_over_batched"] > 0


@pytest.mark.timeout(PATIENCE_S)
def test_plan_changes_measures_delays_and_loses_no_row(tmp_path: Path) -> None:
    figures = run_quick("plan_changes", tmp_path / "plan_changes.svg")
    assert (figures["lost"], figures["doubled"], figures["problems"], figures["random_problems"]) == (0, 0, [], [])
    assert figures["random_changes"] >= 4
    delays = figures["first_row_ms"]
    # A busy machine may be slow, but a change must not take as long as a new driver.
    assert 0 < delays["insert a filter"] < delays["a new driver"]
    assert 0 < delays["insert a keyed operator"] < delays["a new driver"]
    assert figures["within_stage_met_tasks"] + figures["within_stage_met_none"] == 3
    assert figures["exchange_epochs"] > 0


@pytest.mark.timeout(PATIENCE_S)
def test_kafka_compares_rows_and_latency_with_plain_spark(tmp_path: Path) -> None:
    for part in (jars.BROKER, jars.CONNECTOR):
        if not jars.present(part):
            pytest.skip(f"the jars of Kafka's {part} are not in {jars.folder()}; {jars.COMMAND} fetches them")
    figures = run_quick("kafka", tmp_path / "kafka.svg")
    assert min(figures[f"{side}_latency_p50_ms"] for side in ("midstream", "plain")) > 0
    assert figures["kafka_ratio"] > 0
    assert figures["change_delay_ms"] > 0


@pytest.mark.timeout(PATIENCE_S)
def test_nexmark_compares_each_query_with_spark(tmp_path: Path) -> None:
    figures = run_quick("nexmark", tmp_path / "nexmark.svg")
    assert set(figures["over_spark"]) == {"q0", "q2", "q5", "q14"}
    assert set(figures["over_spark_python"]) == {"q0", "q2", "q14"}
    for side, queries in {"midstream": 4, "Spark SQL": 4, "Spark, Python": 3}.items():
        for figure in ("events_per_s", "latency_p50_ms"):
            found = figures[figure][side].values()
            assert len(found) == queries, (side, figure)
            assert min(found) > 0, (side, figure)


@pytest.mark.timeout(PATIENCE_S)
def test_tuning_follows_a_controller_to_its_end(tmp_path: Path) -> None:
    figures = run_quick("tuning", tmp_path / "tuning.svg")
    assert figures["objective_ms"] > 0
    assert len(figures["curve"]) == 3
    assert len(figures["end_over_best"]) == len(figures["steps"]) == 1
    assert figures["steps"][0] >= 1, "it starts far below the best pace"


@pytest.mark.timeout(PATIENCE_S)
def test_elasticity_loses_no_row_on_any_side(tmp_path: Path) -> None:
    figures = run_quick("elasticity", tmp_path / "elasticity.svg")
    assert (figures["lost"], figures["doubled"]) == (0, 0)
    assert set(figures["runs"]) == {"AutoScale", "stop and start", "an executor is killed"}
    assert figures["runs"]["stop and start"]["partitions"] == 2
