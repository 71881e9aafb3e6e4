"""A job whose checkpoint is damaged, does not fit, or has no space reports the error, and never guesses."""

from __future__ import annotations

import errno
import json
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from midstream import Flow, ListSource, MemorySink, Stream, agg, sliding, tumbling
from midstream.checkpoint.location import Checkpoint
from midstream.errors import CheckpointError, FlowError, JobFailed
from midstream.operators.stream import KeyedStream
from midstream.state import lineage
from midstream.state.files import StateFiles
from midstream.state.lineage import Lineage
from midstream.storage.blobs import Blob
from midstream.testing import ManualClock, run_local
from tests.keyed_oracle import KeyedOracle, us
from tests.oracle import Row, multiset
from tests.simulation.keyed_flows import START, at, small_thresholds
from tests.simulation.keyed_state import compare_state

pytestmark = pytest.mark.long

SCHEMA = "k string, n int, t timestamp"
EPOCHS: list[list[Row]] = [
    [{"k": "abc"[(3 * n + i) % 3 if i else n % 3], "n": n + i, "t": at(4 * n + i)} for i in range(4)] for n in range(8)
]
BEFORE = 5
"""Number of committed epochs before the damage."""


def total(key: str, row: Row, state: Any) -> Row:
    state.set(state.get(0) + row["n"])
    state.list().append(row["n"], keep=3)
    return {**row, "n": state.get()}


class World:
    """A flow with state, the output of its sink, and its checkpoint."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "checkpoint"
        self.out = MemorySink()
        self.windows = MemorySink()

    def flow(self, start: int, end: int) -> Flow:
        flow = Flow("damaged")
        rows = flow.source("rows", ListSource(EPOCHS[start:end], SCHEMA, event_time="t")).key_by("by_k", "k")
        rows.process("total", total).sink("out", self.out)
        rows.aggregate("windows", window=tumbling("10 seconds"), n=agg.sum("n")).sink("closed", self.windows)
        return flow

    def run(self, start: int, end: int) -> None:
        with small_thresholds(2), patch.object(lineage, "MIN_ROWS", 5):
            run_local(self.flow(start, end), checkpoint=str(self.folder), clock=ManualClock(us(START)))

    def files(self) -> dict[str, bytes]:
        """All files except the lock."""
        found = (path for path in self.folder.rglob("*") if path.is_file() and path.name != "lock")
        return {str(path.relative_to(self.folder)): path.read_bytes() for path in found}

    def needed(self) -> list[Path]:
        """The state files that the newest manifest refers to."""
        manifest = Checkpoint.look(str(self.folder), self.flow(0, 1).graph).newest_manifest()
        assert manifest is not None
        lineages = [Lineage.decode(data) for data in manifest.lineages.values()]
        return [self.folder / "state" / entry.file.name for each in lineages for entry in each.entries]

    def committed(self) -> int:
        return len(list((self.folder / "epochs").iterdir()))

    def check(self) -> None:
        """Check that the output is as if every epoch had run exactly once."""
        graph = self.flow(0, len(EPOCHS)).graph
        oracle = KeyedOracle(graph)
        answers = [oracle.epoch({"rows": rows}).sinks for rows in EPOCHS]
        for name, sink in (("out", self.out), ("closed", self.windows)):
            assert sorted(sink.tables) == list(range(len(EPOCHS)))
            for epoch, answer in enumerate(answers):
                assert multiset(sink.tables[epoch].to_pylist()) == multiset(answer[name])
        assert compare_state(str(self.folder), graph, oracle, "") > 6


@pytest.fixture
def world(tmp_path: Path) -> World:
    made = World(tmp_path)
    made.run(0, BEFORE)
    return made


# ── damage ────────────────────────────────────────────────────────────────────────────────────────────────────────


def flipped(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def halved(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def emptied(path: Path) -> None:
    path.write_bytes(b"")


DAMAGES: list[Callable[[Path], None]] = [flipped, halved, emptied, Path.unlink]


@contextmanager
def damaged(path: Path, damage: Callable[[Path], None]) -> Iterator[None]:
    data = path.read_bytes()
    damage(path)
    yield
    path.write_bytes(data)


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_a_damaged_state_file_is_named_and_restoring_it_is_enough(world: World, damage: Any) -> None:
    files = world.needed()
    assert {path.name.split("-")[4] for path in files} == {"delta", "merged", "snapshot"}
    for path in files:
        with damaged(path, damage), pytest.raises((CheckpointError, JobFailed), match=path.name):
            world.run(BEFORE, len(EPOCHS))
        assert world.committed() == BEFORE
    world.run(BEFORE, len(EPOCHS))
    world.check()


@pytest.mark.parametrize("damage", DAMAGES[:-1], ids=lambda damage: damage.__name__)
def test_a_damaged_manifest_of_an_epoch_that_spark_has_committed_is_named_and_restoring_it_is_enough(
    world: World, damage: Any
) -> None:
    newest = max((world.folder / "epochs").iterdir())
    commit = world.folder / "spark" / "commits" / str(int(newest.name))
    commit.parent.mkdir(parents=True)
    commit.write_text("v1\n{}")
    with (
        damaged(newest, damage),
        pytest.raises(CheckpointError, match=rf"{newest.name}.*go back to epoch {BEFORE - 2}"),
    ):
        world.run(BEFORE, len(EPOCHS))
    world.run(BEFORE, len(EPOCHS))
    world.check()


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_an_uncommitted_epoch_without_a_manifest_is_run_again(world: World, damage: Any) -> None:
    damage(max((world.folder / "epochs").iterdir()))
    world.run(BEFORE - 1, len(EPOCHS))
    world.check()


@pytest.mark.parametrize("damage", DAMAGES[:-1], ids=lambda damage: damage.__name__)
def test_a_damaged_blob_is_written_again_or_named_and_restoring_it_is_enough(world: World, damage: Any) -> None:
    blobs = [path for path in (world.folder / "blobs").rglob("*") if path.is_file()]
    assert len(blobs) > 2
    errors = {}
    for path in blobs:
        with damaged(path, damage):
            try:
                world.run(BEFORE, BEFORE)
            except (CheckpointError, JobFailed) as error:
                errors[path.name] = str(error)
            else:
                assert Blob.of(path.read_bytes()).digest == path.name, "the script has it, so it was written again"
    assert 0 < len(errors) < len(blobs)
    assert all(name in error for name, error in errors.items())
    world.run(BEFORE, len(EPOCHS))
    world.check()


@pytest.mark.parametrize("damage", [halved, emptied], ids=lambda damage: damage.__name__)
def test_a_damaged_identity_is_refused(world: World, damage: Any) -> None:
    path = world.folder / "midstream.json"
    with damaged(path, damage), pytest.raises(CheckpointError, match=r"midstream\.json"):
        world.run(BEFORE, len(EPOCHS))
    world.run(BEFORE, len(EPOCHS))
    world.check()


def test_another_format_of_checkpoint_is_refused(world: World) -> None:
    path = world.folder / "midstream.json"
    identity = json.loads(path.read_bytes())
    path.write_text(json.dumps(identity | {"format": 99}))
    before = world.files()
    with pytest.raises(CheckpointError, match="has format 99"):
        world.run(BEFORE, len(EPOCHS))
    assert world.files() == before


# ── no room ───────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("nth", [0, 1, 2, 5])
def test_a_full_disk_fails_the_job_and_a_later_run_continues_exactly(world: World, nth: int) -> None:
    write, written = StateFiles.write, iter(range(1000))

    def full(self: StateFiles, *args: Any) -> Any:
        if next(written) >= nth:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(self, *args)

    with patch.object(StateFiles, "write", full), pytest.raises(JobFailed, match="No space left on device"):
        world.run(BEFORE, len(EPOCHS))
    world.run(world.committed(), len(EPOCHS))
    world.check()


def test_no_space_for_a_manifest_fails_the_job_and_a_later_run_continues_exactly(world: World) -> None:
    def full(*_: Any) -> None:
        raise CheckpointError("cannot write: No space left on device")

    with patch.object(Checkpoint, "commit", full), pytest.raises((JobFailed, CheckpointError), match="No space left"):
        world.run(BEFORE, len(EPOCHS))
    assert world.committed() == BEFORE
    world.run(BEFORE, len(EPOCHS))
    world.check()


# ── what does not fit ─────────────────────────────────────────────────────────────────────────────────────────────

Keyed = Callable[[KeyedStream], Stream]


def lived(folder: Path, keyed: Keyed, keys: tuple[str, ...] = ("k",)) -> list[Row]:
    """Run a flow with one operator that keeps state once more."""
    flow, out = Flow("f"), MemorySink()
    rows = flow.source("rows", ListSource(EPOCHS[:2], SCHEMA, event_time="t"))
    keyed(rows.key_by("by", *keys)).sink("out", out)
    run_local(flow, checkpoint=str(folder))
    return out.rows


FIRST: dict[str, Keyed] = {
    "aggregate": lambda rows: rows.aggregate("op", n=agg.sum("n")),
    "window": lambda rows: rows.aggregate("op", window=tumbling("5 seconds"), n=agg.sum("n")),
    "distinct": lambda rows: rows.distinct("op"),
    "process": lambda rows: rows.process("op", total),
}
CHANGED: dict[str, tuple[str, Keyed, tuple[str, ...], str, str]] = {
    "aggregation": ("aggregate", lambda rows: rows.aggregate("op", n=agg.max("n")), ("k",), "sum", "max"),
    "one more": ("aggregate", lambda rows: rows.aggregate("op", n=agg.sum("n"), c=agg.count()), ("k",), "sum", "count"),
    "window": (
        "window",
        lambda rows: rows.aggregate("op", window=sliding("10 seconds", every="5 seconds"), n=agg.sum("n")),
        ("k",),
        "Tumbling",
        "Sliding",
    ),
    "size": (
        "window",
        lambda rows: rows.aggregate("op", window=tumbling("6 seconds"), n=agg.sum("n")),
        ("k",),
        "5000000",
        "6000000",
    ),
    "keys": ("aggregate", FIRST["aggregate"], ("k", "t"), r"\('k',\)", r"\('k', 't'\)"),
    "keys of a process": ("process", FIRST["process"], ("n",), r"\('k',\)", r"\('n',\)"),
    "within": ("distinct", lambda rows: rows.distinct("op", within="5 seconds"), ("k",), "distinct", "within_us"),
    "kind": ("aggregate", lambda rows: rows.process("op", total), ("k",), "aggregate", "process"),
}


@pytest.mark.parametrize("what", CHANGED)
def test_an_operator_that_cannot_read_its_state_is_refused_before_anything_changes(what: str, tmp_path: Path) -> None:
    first, changed, keys, was, now = CHANGED[what]
    lived(tmp_path, FIRST[first])
    world = World(tmp_path)
    world.folder = tmp_path
    before = world.files()
    with pytest.raises(CheckpointError, match=rf"(?s)operator 'op'.*{was}.*but the flow has.*{now}"):
        lived(tmp_path, changed, keys)
    assert world.files() == before
    lived(tmp_path, FIRST[first])
    assert len(list((tmp_path / "epochs").iterdir())) == 4


def test_a_process_with_another_function_keeps_its_state(tmp_path: Path) -> None:
    lived(tmp_path, FIRST["process"])
    sums = {key: sum(row["n"] for rows in EPOCHS[:2] for row in rows if row["k"] == key) for key in "abc"}
    found = lived(tmp_path, lambda rows: rows.process("op", lambda key, row, state: {**row, "n": state.get()}))
    assert {(row["k"], row["n"]) for row in found} == {(key, sums[key]) for key in {row["k"] for row in found}}


def test_a_missing_class_of_a_value_is_named_and_restoring_it_is_enough(tmp_path: Path) -> None:
    module = types.ModuleType("vanishing")
    exec("class Purse:\n    def __init__(self, n):\n        self.n = n\n", module.__dict__)

    def keep(key: str, row: Row, state: Any) -> Row:
        import vanishing  # type: ignore[import-not-found]

        purse = state.get() or vanishing.Purse(0)
        state.set(vanishing.Purse(purse.n + row["n"]))
        return {**row, "n": state.get().n}

    def seen(key: str, row: Row, state: Any) -> Row:
        return {**row, "n": state.get().n}

    def of(function: Any) -> Keyed:
        return lambda rows: rows.process("op", function)

    with patch.dict(sys.modules, {"vanishing": module}):
        lived(tmp_path, of(keep))
    with pytest.raises(JobFailed, match=r"(?s)'op'.*key .* needs a class that no longer exists.*vanishing"):
        lived(tmp_path, of(seen))
    with patch.dict(sys.modules, {"vanishing": module}):
        found = lived(tmp_path, of(seen))
    sums = {key: sum(row["n"] for rows in EPOCHS[:2] for row in rows if row["k"] == key) for key in "abc"}
    assert {(row["k"], row["n"]) for row in found} == {(key, sums[key]) for key in {row["k"] for row in found}}


# ── keys ──────────────────────────────────────────────────────────────────────────────────────────────────────────

OPERATORS: dict[str, Keyed] = {
    **FIRST,
    "join": lambda rows: rows.join(
        "op",
        rows._flow.source("more", ListSource([[]], "k2 string, m int, u timestamp", event_time="u")).key_by("k2", "k2"),
        within="1 second",
    ),
}


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize(("key", "told"), [(None, "'k' is null"), ("x" * 600, "600|bytes")], ids=["null", "huge"])
def test_keys_that_state_cannot_hold_fail_the_job_and_show_the_row(
    operator: str, key: str | None, told: str, tmp_path: Path
) -> None:
    flow = Flow("f")
    epochs: list[list[Row]] = [
        [{"k": "a", "n": 1, "t": at(0)}],
        [{"k": "a", "n": 2, "t": at(1)}, {"k": key, "n": 3, "t": at(2)}],
    ]
    rows = flow.source("rows", ListSource(epochs, SCHEMA, event_time="t")).key_by("by", "k")
    OPERATORS[operator](rows).sink("out", MemorySink())
    with pytest.raises(JobFailed, match=rf"(?s)'op'.*({told})") as caught:
        run_local(flow, checkpoint=str(tmp_path))
    assert "'n': 3" in caught.value.row
    assert len(list((tmp_path / "epochs").iterdir())) == 1


@pytest.mark.parametrize("kind", ["double", "float", "array<int>"])
def test_keys_of_types_that_are_not_exact_are_refused_when_the_flow_is_built(kind: str) -> None:
    rows = Flow("f").source("rows", ListSource([[]], f"k {kind}"))
    with pytest.raises(FlowError, match="'k'"):
        rows.key_by("by", "k")
