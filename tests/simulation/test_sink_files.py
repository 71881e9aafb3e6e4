"""File sinks while the driver crashes: at every step of every commit and merge, and while a disk is full."""

from __future__ import annotations

import errno
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.dataset as ds
import pyarrow.parquet as papq
import pytest

from midstream import FileSink, Flow, ListSource
from midstream.checkpoint import sink_files
from midstream.checkpoint.sink_files import committed_files
from midstream.errors import MidstreamError
from midstream.runtime.edge import DriverCrashed, ProcessEnded
from midstream.runtime.local import runtime as local
from midstream.storage import disk
from midstream.storage.table_files import epochs_of
from midstream.testing import run_local

EPOCHS: list[list[dict[str, Any]]] = [[{"n": 10 * epoch + i, "k": "ab"[i % 2]} for i in range(4)] for epoch in range(8)]


def flow_to(sink: FileSink, function: Callable[[Any], Any] | None = None) -> Flow:
    flow = Flow("files")
    rows = flow.source("in", ListSource(EPOCHS, "n bigint, k string", partitions=2))
    rows.key_by("by", "k").map("m", function or (lambda row: row)).sink("out", sink)
    return flow


def seen(folder: Path, format: str = "parquet") -> list[tuple[int, int]]:
    """What a plain reader sees."""
    rows = ds.dataset(folder, partitioning="hive", format=format).to_table().to_pylist() if folder.exists() else []
    return sorted((row["epoch"], row["n"]) for row in rows)


def committed(folder: Path) -> list[tuple[int, int]]:
    files = committed_files(str(folder))
    return sorted((row["epoch"], row["n"]) for row in ds.dataset(files).to_table().to_pylist()) if files else []


def expected(epochs: int) -> list[tuple[int, int]]:
    return [(epoch, row["n"]) for epoch in range(epochs) for row in sorted(EPOCHS[epoch], key=lambda row: row["n"])]


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Merges come early; counts the steps that drivers have come to."""
    found = Counter[str]()
    at = local._Runtime.at

    def counted(runtime: Any, step: str) -> None:
        found[step] += 1
        at(runtime, step)

    monkeypatch.setattr(sink_files, "MERGE_FILES", 3)
    monkeypatch.setattr(local._Runtime, "at", counted)
    return found


@pytest.mark.parametrize(
    "sink",
    [
        pytest.param({}, id="plain", marks=(pytest.mark.long, pytest.mark.slow)),
        pytest.param({"partition_by": "k"}, id="folders", marks=(pytest.mark.long, pytest.mark.slow)),
        pytest.param({"format": "json"}, id="json", marks=pytest.mark.long),
    ],
)
def test_a_plain_reader_sees_committed_epochs_after_a_crash_at_any_step(tmp_path, monkeypatch, steps, sink):
    """One run for each step that a run without crashes comes to; the driver crashes there, and again in its restart."""
    run_local(flow_to(FileSink(tmp_path / "all", **sink)), checkpoint=str(tmp_path / "c"))
    format = sink.get("format", "parquet")
    count, merges = steps.total(), steps["merge decided"]
    assert merges == 0 if sink.get("format") else merges > 0, steps
    start, counted = local._Runtime._start_driver, local._Runtime.at
    for number in range(count):
        folder = tmp_path / f"out {number}"
        crashes = {number, number + 2}

        def at(runtime: Any, step: str, crashes: set[int] = crashes) -> None:
            counted(runtime, step)
            if steps.total() - 1 in crashes:
                crashes.remove(steps.total() - 1)
                raise DriverCrashed

        def started(runtime: Any, folder: Path = folder, crashes: set[int] = crashes) -> None:
            while True:
                try:
                    start(runtime)
                except DriverCrashed:
                    continue
                break
            newest = runtime.checkpoint.newest_manifest()
            assert seen(folder, format) == expected(0 if newest is None else newest.epoch + 1), crashes
            if not sink:
                assert committed(folder) == seen(folder)

        steps.clear()
        with monkeypatch.context() as patched:
            patched.setattr(local._Runtime, "at", at)
            patched.setattr(local._Runtime, "_start_driver", started)
            run_local(flow_to(FileSink(folder, **sink)), checkpoint=str(tmp_path / f"c {number}"))
        assert seen(folder, format) == expected(len(EPOCHS)), f"crashed at {number}"


def test_a_disk_that_fills_while_tasks_write_fails_the_epoch_and_no_part_of_it_is_visible(tmp_path, monkeypatch):
    write = papq.ParquetWriter.write_batch

    def full(writer: Any, batch: Any, *more: Any) -> None:
        if batch["epoch"][0].as_py() == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(writer, batch, *more)

    sink, checkpoint = FileSink(tmp_path / "out"), str(tmp_path / "c")
    with monkeypatch.context() as patched:
        patched.setattr(papq.ParquetWriter, "write_batch", full)
        with pytest.raises(MidstreamError, match=r"'out'.*epoch 2 cannot be written to .*No space left on device"):
            run_local(flow_to(sink), checkpoint=checkpoint)
    assert seen(tmp_path / "out") == committed(tmp_path / "out") == expected(2)
    run_local(_rest(flow_to(sink), 2), checkpoint=checkpoint)
    assert seen(tmp_path / "out") == committed(tmp_path / "out") == expected(len(EPOCHS))
    assert list((tmp_path / "out" / "_staged").iterdir()) == []


def _rest(flow: Flow, start: int) -> Flow:
    """The same flow, over the epochs that are left."""
    flow._payloads["in"] = ListSource(EPOCHS[start:], "n bigint, k string", partitions=2)
    return flow


def test_a_disk_that_fills_while_files_are_published_is_reported_and_the_next_start_continues(tmp_path, monkeypatch):
    rename = disk.rename_file

    def full(source: str, target: str, *, durable: bool) -> None:
        if epochs_of(target) == (1, 1):
            raise OSError(errno.ENOSPC, "No space left on device")
        rename(source, target, durable=durable)

    sink, checkpoint = FileSink(tmp_path / "out"), str(tmp_path / "c")
    with monkeypatch.context() as patched:
        patched.setattr(disk, "rename_file", full)
        with pytest.raises(MidstreamError, match=r"cannot be put in place in .*No space left.*a restart tries again"):
            run_local(flow_to(sink), checkpoint=checkpoint)
    assert committed(tmp_path / "out") == expected(1), "epoch 1 is committed, and not in place"
    run_local(_rest(flow_to(sink), 2), checkpoint=checkpoint)
    assert seen(tmp_path / "out") == expected(len(EPOCHS))


def test_a_sink_may_get_another_folder_between_two_runs_of_a_job(tmp_path, monkeypatch):
    """The first run dies with the files of epoch 7 in the manifest, and staged; the second one writes elsewhere."""
    old, new, checkpoint = tmp_path / "old", tmp_path / "new", str(tmp_path / "c")
    with monkeypatch.context() as patched:
        patched.setattr(local._Runtime, "at", _dies_with_the_manifest_of(len(EPOCHS)))
        with pytest.raises(ProcessEnded):
            run_local(flow_to(FileSink(old)), checkpoint=checkpoint)
    assert seen(old) == expected(len(EPOCHS) - 1)
    run_local(flow_to(FileSink(new)), checkpoint=checkpoint)
    assert seen(old) == committed(old) == expected(len(EPOCHS))
    again = [(len(EPOCHS) + epoch, n) for epoch, n in expected(len(EPOCHS))]  # a list's rows come again in each run
    assert seen(new) == committed(new) == again


def _dies_with_the_manifest_of(epochs: int) -> Callable[[Any, str], None]:
    written = 0

    def at(runtime: Any, step: str) -> None:
        nonlocal written
        written += step == "manifest written"
        if written == epochs:
            raise ProcessEnded

    return at
