"""Spark's log after it was exchanged for one with other sources: savepoints, forks, rewinds and starts go by it."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from midstream import Flow, Insert, ListSource, NoopSink, Remove, fork, rewind, savepoints, take_savepoint
from midstream.checkpoint.location import Checkpoint
from midstream.errors import CheckpointError
from midstream.ids import Epoch
from midstream.runtime.job_start import settle_sources
from midstream.testing import ChangeAt, run_local

EPOCHS = 4
NEWEST = Epoch(EPOCHS - 1)


def stream() -> ListSource:
    return ListSource([[{"n": epoch}] for epoch in range(EPOCHS)], "n bigint")


def script(*names: str) -> Flow:
    flow = Flow("numbers")
    first, *others = [flow.source(name, stream()) for name in names]
    (first.union("all", *others) if others else first).sink("out", NoopSink())
    return flow


def run(at: Path, *names: str) -> Checkpoint:
    """A job that read sources, with a log as Spark would have left it: each line says whose it is and of when."""
    run_local(script(*names), checkpoint=str(at))
    checkpoint = Checkpoint.of_any_flow(str(at))
    write_log(checkpoint, NEWEST)
    return checkpoint


def write_log(checkpoint: Checkpoint, newest: Epoch) -> None:
    names = checkpoint.identity.sources
    for epoch in (newest - 1, newest):
        lines = "\n".join(f"{name}{epoch}" for name in names)
        checkpoint.spark_files.write({f"offsets/{epoch}": f"v1\n{{}}\n{lines}".encode(), f"commits/{epoch}": b"v1\n{}"})
    files = {f"sources/{place}/0": f"memory of {name}".encode() for place, name in enumerate(names)}
    checkpoint.spark_files.write({"metadata": b"{}", **files})


def lines(checkpoint: Checkpoint, epoch: Epoch = NEWEST) -> list[str]:
    return checkpoint.spark_files.needed_after(epoch)[f"offsets/{epoch}"].decode().split("\n")[2:]


@pytest.mark.parametrize(("before", "after"), [(("b",), ("a", "b")), (("a", "b"), ("b",)), (("a", "b"), ("b", "c"))])
def test_a_savepoint_between_a_hand_over_and_its_first_epoch_is_for_the_sources_of_the_last_one(
    before: tuple[str, ...], after: tuple[str, ...], tmp_path: Path
) -> None:
    """No epoch may come for a long time, if the new sources have no rows."""
    checkpoint = run(tmp_path / "job", *before)
    checkpoint.change_sources(after)
    take_savepoint(str(tmp_path / "job"), "now")
    fork(str(tmp_path / "job"), "now", str(tmp_path / "fork"))
    found = Checkpoint.of_any_flow(str(tmp_path / "fork"))
    assert found.identity.sources == before
    assert lines(found) == [f"{name}{NEWEST}" for name in before]
    memory = {name: data for name, data in found.spark_files.needed_after(NEWEST).items() if name.startswith("sources")}
    assert memory == {f"sources/{place}/0": f"memory of {name}".encode() for place, name in enumerate(before)}
    assert not found.spark_files.needed_after(NEWEST).keys() & {"kept/a/offset", "kept/b/offset"}


def test_a_savepoint_that_is_taken_during_a_hand_over_is_whole(tmp_path: Path) -> None:
    """It waits: for a moment there are two logs, and then none where the old one was."""
    checkpoint = run(tmp_path, "a")
    taken: list[dict[str, bytes]] = []
    threads: list[threading.Thread] = []

    def at(step: str) -> None:
        threads.append(threading.Thread(target=lambda: taken.append(checkpoint.log_after(NEWEST, ["a"])[1])))
        threads[-1].start()
        threads[-1].join(0.1)
        assert threads[-1].is_alive(), "it waits until the exchange is over"

    checkpoint.change_sources(["a", "b"], at)
    for thread in threads:
        thread.join(60)
    assert [each[f"offsets/{NEWEST}"] for each in taken] == [f"v1\n{{}}\na{NEWEST}".encode()] * 2


def test_a_rewind_to_a_savepoint_does_not_cross_two_hand_overs_that_lead_back_to_the_same_sources(
    tmp_path: Path,
) -> None:
    """How far b was read meanwhile is kept. If the job went back, and b came again, b would go on from there: the rows
    before would be lost, because what the job had written of them is taken back."""
    at = str(tmp_path / "job")
    checkpoint = run(tmp_path / "job", "a")
    take_savepoint(at, "before b")
    assert savepoints(at)[0].log == 0
    come = Insert(
        lambda old, new: old.union("all", new), between=("a", "out"), source=lambda flow: flow.source("b", stream())
    )
    run_local(script("a"), checkpoint=at, changes=[ChangeAt.of(1, come), ChangeAt.of(3, Remove("b"))])
    checkpoint = Checkpoint.of_any_flow(at)
    assert checkpoint.identity.sources == ("a",)
    assert checkpoint.identity.log >= 2
    newest = checkpoint.newest_manifest()
    assert newest is not None
    with pytest.raises(CheckpointError, match=r"sources of the job have changed since the savepoint 'before b'"):
        rewind(at, "before b")
    with pytest.raises(CheckpointError) as refused:
        rewind(at, newest.epoch)
    assert "before b" not in str(refused.value).partition("can be rewound to")[2]
    fork(at, "before b", str(tmp_path / "fork"))
    assert lines(Checkpoint.of_any_flow(str(tmp_path / "fork"))) == [f"a{NEWEST}"]


@pytest.mark.parametrize("committed", [True, False])
def test_a_start_does_not_lose_state_that_spark_keeps_for_a_source(committed: bool, tmp_path: Path) -> None:
    """Unless no epoch that counts was computed with it, after a hand-over that is taken back."""
    checkpoint = run(tmp_path, "a", "b") if committed else run(tmp_path, "a")
    if not committed:
        checkpoint.change_sources(["a", "b"])
    checkpoint.spark_files.write({"state/0/0/1.delta": b"numbers"})
    before = checkpoint.identity
    if committed:
        with pytest.raises(CheckpointError, match=r"reads the sources a, b, and would now read a\. .*keeps state"):
            settle_sources(checkpoint, script("a").graph)
        assert checkpoint.identity == before
        settle_sources(checkpoint, script("b", "a").graph)  # the same ones
        assert lines(checkpoint) == [f"a{NEWEST}", f"b{NEWEST}"]
    else:
        settle_sources(checkpoint, script("a").graph)
        assert checkpoint.identity.sources == ("a",)
        assert lines(checkpoint) == [f"a{NEWEST}"]


def test_a_log_of_another_format_is_refused_and_nothing_changes(tmp_path: Path) -> None:
    checkpoint = run(tmp_path, "a")
    checkpoint.spark_files.write({f"offsets/{NEWEST}": b'v2\n{}\n{"a": 1}'})
    before = checkpoint.identity
    with pytest.raises(CheckpointError, match=r"has the format v2.*enableSourceEvolution"):
        checkpoint.change_sources(["a", "b"])
    assert checkpoint.identity == before
    assert checkpoint.spark_files.needed_after(NEWEST)


def test_a_log_that_was_begun_ahead_is_written_anew_when_it_is_used(tmp_path: Path) -> None:
    checkpoint = run(tmp_path, "a")
    number, other = checkpoint.new_log(["a", "b"]), checkpoint.new_log(["a", "c"])
    assert len({checkpoint.identity.log, number, other}) == 3, "no two queries use the same folder"
    assert lines(checkpoint) == [f"a{NEWEST}"], "nobody uses them yet"
    begun = tmp_path / f"spark-{number}"
    assert (begun / f"offsets/{NEWEST}").read_text().split("\n")[2:] == [f"a{NEWEST}", "-"]
    mine = (begun / "metadata").read_bytes()
    (begun / "offsets/99").write_text("of an epoch that does not count")

    checkpoint.spark_files.write({f"offsets/{NEWEST}": b"v1\n{}\nfurther on", "sources/0/1": b"more of a"})
    checkpoint.change_sources(["a", "b"], log=number)
    assert checkpoint.identity.log == number
    assert lines(checkpoint) == ["further on", "-"]
    assert checkpoint.spark_files.needed_after(NEWEST)["sources/0/1"] == b"more of a"
    assert (begun / "metadata").read_bytes() == mine, "the query that is held there goes by it"
    assert not (begun / "offsets/99").exists()

    checkpoint.remove_log(other)
    checkpoint.remove_log(number)
    assert sorted(path.name for path in tmp_path.glob("spark*")) == [f"spark-{number}"], "what is in use stays"
