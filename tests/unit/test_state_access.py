"""How a worker opens state, and closes it when too much of it is mapped."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from midstream import Flow, ListSource, MemorySink, agg
from midstream.errors import CheckpointError
from midstream.ids import BinId, Epoch, PartitionId, Run
from midstream.state import access
from midstream.state.access import StateAccess, mapped_bytes
from midstream.state.base import Base
from midstream.state.files import Author, StateFiles
from midstream.state.lineage import Lineage
from midstream.testing import run_local


def test_bases_are_closed_only_if_too_much_is_mapped_and_lose_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = StateAccess("job", str(tmp_path / "files"), str(tmp_path / "local"))
    with state.open(Lineage.start("count"), [BinId(7)]) as task:
        task.put_many([b"\x07\x00ann"], [b"1"])
        delta = task.write_delta(Author("count", Epoch(0), Run(0), PartitionId(0), attempt=0))
    assert delta is not None
    lineage = Lineage.start("count").after(Epoch(0), [delta])

    monkeypatch.setattr(access, "MAPPED_LIMIT", mapped_bytes() + (1 << 40))
    state.trim()
    assert [folder for folder in Base._shared if folder.startswith(state.local)]

    monkeypatch.setattr(access, "MAPPED_LIMIT", -1)
    state.trim()
    assert [folder for folder in Base._shared if folder.startswith(state.local)] == []
    with state.open(lineage, [BinId(7)]) as task:
        assert task.get_many([b"\x07\x00ann"]) == [b"1"]
    state.close()


def test_a_start_with_the_same_local_folder_fetches_only_missing_files(tmp_path: Path) -> None:
    """Shown by removing the other files."""
    files = StateFiles(str(tmp_path / "files"))
    lineages = [Lineage.start("count")]

    def start(local: str) -> StateAccess:
        return StateAccess("job", files.location, str(tmp_path / local))

    def epoch(state: StateAccess, key: bytes, value: bytes) -> str:
        before = lineages[-1]
        with state.open(before, [BinId(7)]) as task:
            task.put_many([key], [value])
            delta = task.write_delta(Author("count", Epoch(before.epoch + 1), Run(0), PartitionId(0), attempt=0))
        assert delta is not None
        lineages.append(before.after(Epoch(before.epoch + 1), [delta]))
        return delta.name

    def held(state: StateAccess) -> list[bytes | None]:
        with state.open(lineages[-1], [BinId(7)]) as task:
            return task.get_many([b"\x07\x00ann", b"\x07\x00bob"])

    first = start("disk")
    old = [epoch(first, b"\x07\x00ann", b"1"), epoch(first, b"\x07\x00bob", b"1")]
    assert held(first) == [b"1", b"1"]
    first.close()
    elsewhere = start("another disk")
    new = epoch(elsewhere, b"\x07\x00ann", b"2")
    elsewhere.close()

    files.remove(old)
    assert files.names() == [new]
    second = start("disk")
    assert held(second) == [b"2", b"1"]
    second.close()

    third = start("empty disk")
    with pytest.raises(CheckpointError, match=f"{old[0]}' is missing"):
        held(third)
    third.close()


def test_mapped_bytes_reports_mapped_memory() -> None:
    assert mapped_bytes() >= 0


@pytest.mark.parametrize("letter", ["ä", "語", "\U00020000", "x"])
def test_operator_names_of_a_hundred_letters_in_any_alphabet_have_state_folders(tmp_path: Path, letter: str) -> None:
    def run(names: list[str]) -> dict[str, list[int]]:
        flow, sinks = Flow("names"), {name: MemorySink() for name in names}
        rows = flow.source("rows", ListSource([[{"k": 1, "n": 2}], [{"k": 1, "n": 3}]], "k int, n int")).key_by(
            "by", "k"
        )
        for index, name in enumerate(names):
            rows.aggregate(name, n=agg.sum("n")).sink(f"out{index}", sinks[name])
        run_local(flow, checkpoint=str(tmp_path / "checkpoint"))
        return {name: [row["n"] for row in sink.rows] for name, sink in sinks.items()}

    names = [letter * 99 + last for last in ("a", "b")]
    assert run(names) == {name: [2, 5] for name in names}
    assert run(names) == {name: [7, 10] for name in names}, "a restart finds the state of each operator"
    assert len(list((tmp_path / "checkpoint" / "state").iterdir())) == 2


@pytest.mark.parametrize("name", ["語" * 100, "x" * 100, "a.b", "A b"], ids=["wide", "long", "dot", "space"])
def test_local_state_stays_below_its_folder_for_any_operator_name(tmp_path: Path, name: str) -> None:
    state = StateAccess("job", str(tmp_path / "files"), str(tmp_path / "local"))
    with state.open(Lineage.start(name), [BinId(7)]) as task:
        assert task.get_many([b"\x07\x00ann"]) == [None]
    [folder] = (tmp_path / "local").iterdir()
    assert len(os.fsencode(folder.name)) <= 255
    state.close()
