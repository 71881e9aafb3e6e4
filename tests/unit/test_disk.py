"""Files on a local disk survive a power loss once the call that writes them has returned."""

from __future__ import annotations

import errno
import os
import random
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from midstream.storage import disk
from tests.power_loss import (
    AllSynced,
    Created,
    Disk,
    Killed,
    Made,
    Operation,
    Recorder,
    Removed,
    Renamed,
    Synced,
    Written,
)


def recorded(*calls: Any) -> list[Operation]:
    recorder = Recorder()
    with recorder.recording():
        for call in calls:
            call()
    return recorder.operations


def left(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_content_is_synced_before_the_name_and_both_before_returning(tmp_path: Path) -> None:
    path = str(tmp_path / "file")
    temporary = f"{path}.{os.getpid()}.tmp"
    disk.make_folder(str(tmp_path), durable=True)
    assert recorded(lambda: disk.write_file(path, b"data", durable=True)) == [
        Synced(str(tmp_path.parent), is_folder=True),  # once: this process does not know who created the folder
        Created(temporary),
        Written(temporary, b"data"),
        Synced(temporary, is_folder=False),
        Renamed(temporary, path),
        Synced(str(tmp_path), is_folder=True),
    ]
    assert left(tmp_path) == {"file": b"data"}


def test_a_checked_file_is_synced_with_its_name_before_returning(tmp_path: Path) -> None:
    path = str(tmp_path / "file")
    temporary = f"{path}.{os.getpid()}.tmp"
    assert recorded(lambda: disk.write_file(path, b"data", durable=True, checked=True))[1:] == [
        Created(temporary),
        Written(temporary, b"data"),
        Renamed(temporary, path),
        Synced(path, is_folder=False),
        Synced(str(tmp_path), is_folder=True),
    ]
    assert left(tmp_path) == {"file": b"data"}


def test_gathered_files_and_folders_are_synced_once_each(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).write_bytes(b"data")
    unsynced = disk.Unsynced()

    def gather_and_sync() -> None:
        for name in ("a", "b", "a"):
            unsynced.add_file(str(tmp_path / name))
        unsynced.add_names(str(tmp_path))
        unsynced.sync()
        unsynced.sync()  # there is nothing left

    assert recorded(gather_and_sync) == [
        Synced(str(tmp_path / "a"), is_folder=False),
        Synced(str(tmp_path / "b"), is_folder=False),
        Synced(str(tmp_path), is_folder=True),
        Synced(str(tmp_path.parent), is_folder=True),  # once: this process does not know who created the folder
    ]
    assert not unsynced


def test_steps_are_taken_at_once_and_all_of_them_even_if_one_fails() -> None:
    met, taken = threading.Barrier(3), []

    def step(number: int) -> None:
        met.wait(60)  # no step gets on before all have begun
        taken.append(number)
        if number == 1:
            raise OSError(errno.EIO, "step 1")

    with pytest.raises(OSError, match="step 1"):
        disk.at_once([partial(step, number) for number in range(3)])
    assert sorted(taken) == [0, 1, 2]
    disk.at_once([])


def test_new_folders_are_synced_in_their_parents_once_each(tmp_path: Path) -> None:
    path = str(tmp_path / "a" / "b" / "file")
    found = recorded(*[lambda: disk.write_file(path, b"data", durable=True)] * 2)
    assert [operation for operation in found if isinstance(operation, Made | Synced)] == [
        Made(str(tmp_path / "a")),
        Synced(str(tmp_path), is_folder=True),
        Made(str(tmp_path / "a" / "b")),
        Synced(str(tmp_path / "a"), is_folder=True),
        *[Synced(f"{path}.{os.getpid()}.tmp", is_folder=False), Synced(str(tmp_path / "a" / "b"), is_folder=True)] * 2,
    ]


def test_a_folder_that_another_process_created_is_synced_too(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    found = recorded(lambda: disk.write_file(str(tmp_path / "a" / "file"), b"data", durable=True))
    assert found[0] == Synced(str(tmp_path), is_folder=True)


def test_nothing_is_synced_without_durability(tmp_path: Path) -> None:
    path = str(tmp_path / "a" / "file")
    found = recorded(
        lambda: disk.write_file(path, b"data", durable=False),
        lambda: disk.rename_file(path, path + "2", durable=False),
        lambda: disk.remove_file(path + "2"),
    )
    assert [type(operation) for operation in found] == [Made, Created, Written, Renamed, Renamed, Removed]
    assert left(tmp_path) == {}


@pytest.mark.parametrize("data", [b"", b"x" * 3_000_000, pa.py_buffer(b"of arrow")])
def test_any_data_can_be_written_and_replaces_an_existing_file(tmp_path: Path, data: Any) -> None:
    for content in (b"before", data):
        disk.write_file(str(tmp_path / "file"), content, durable=True)
    assert left(tmp_path) == {"file": bytes(data)}


def test_a_rename_is_synced(tmp_path: Path) -> None:
    path = str(tmp_path / "file")
    disk.write_file(path, b"data", durable=True)
    found = recorded(lambda: disk.rename_file(path, path + "2", durable=True))
    assert found == [Renamed(path, path + "2"), Synced(str(tmp_path), is_folder=True)]


def test_a_rename_into_another_folder_is_synced_on_both_sides(tmp_path: Path) -> None:
    path, other = str(tmp_path / "staged" / "file"), str(tmp_path / "table" / "file")
    disk.write_file(path, b"data", durable=True)
    disk.make_folder(str(tmp_path / "table"), durable=True)
    found = recorded(lambda: disk.rename_file(path, other, durable=True))
    folders = [Synced(str(tmp_path / name), is_folder=True) for name in ("table", "staged")]
    assert found == [Renamed(path, other), *folders]


def test_files_of_other_processes_can_be_synced(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"of Spark")
    path = str(tmp_path / "file")
    assert recorded(lambda: disk.sync_file(path), lambda: disk.sync_filesystem(str(tmp_path))) == [
        Synced(path, is_folder=False),
        Synced(str(tmp_path), is_folder=True),
        Synced(str(tmp_path.parent), is_folder=True),  # once: this process does not know who created the folder
        AllSynced(),
    ]
    disk.sync_filesystem(str(tmp_path))
    with pytest.raises(FileNotFoundError):
        disk.sync_file(path + "2")


def test_a_system_without_syncfs_syncs_all_file_systems(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    called = []
    monkeypatch.setattr(disk, "_syncfs", lambda _: -1)
    monkeypatch.setattr(os, "sync", lambda: called.append("sync"))
    disk.sync_filesystem(str(tmp_path))
    assert called == ["sync"]


def test_a_removed_folder_is_recreated(tmp_path: Path) -> None:
    path = tmp_path / "a" / "file"
    disk.write_file(str(path), b"one", durable=True)
    path.unlink()
    path.parent.rmdir()
    found = recorded(lambda: disk.write_file(str(path), b"two", durable=True))
    assert Made(str(path.parent)) in found
    assert Synced(str(tmp_path), is_folder=True) in found
    assert left(tmp_path) == {"a/file": b"two"}


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
def test_a_failed_sync_fails_the_write_and_keeps_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    path = str(tmp_path / "file")
    disk.write_file(path, b"before", durable=True)

    def failing(_: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", failing)
    with pytest.raises(OSError, match=os.strerror(number)):
        disk.write_file(path, b"after", durable=True)
    assert left(tmp_path) == {"file": b"before"}


def test_a_file_system_that_cannot_sync_folders_is_supported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.fsync

    def only_files(file: int) -> None:
        if os.path.isdir(f"/proc/self/fd/{file}"):
            raise OSError(errno.EINVAL, "Invalid argument")
        real(file)

    monkeypatch.setattr(os, "fsync", only_files)
    disk.write_file(str(tmp_path / "a" / "file"), b"data", durable=True)
    assert left(tmp_path) == {"a/file": b"data"}


# ── after a crash ─────────────────────────────────────────────────────────────────────────────────────────────────


def trees(operations: list[Operation], root: Path, folder: Path) -> list[dict[str, bytes]]:
    """What many crashes may leave, at each point of a recording."""
    found = []
    for end in range(len(operations) + 1):
        for seed in range(40):
            place = folder / f"{end}-{seed}"
            Disk(str(root)).after(operations[:end]).crash(random.Random(seed), place)
            found.append(left(place))
    return found


def test_a_crash_leaves_the_old_or_the_new_file_and_afterwards_the_new_one(tmp_path: Path) -> None:
    root, path = tmp_path / "root", str(tmp_path / "root" / "a" / "file")
    root.mkdir()
    first = recorded(lambda: disk.write_file(path, b"before", durable=True))
    second = recorded(lambda: disk.write_file(path, b"afterwards", durable=True))
    found = trees([*first, *second], root, tmp_path)
    assert {tree.get("a/file") for tree in found} == {None, b"before", b"afterwards"}
    assert {tree["a/file"] for tree in trees(first, root, tmp_path / "x")[-40:]} == {b"before"}
    assert {tree["a/file"] for tree in found[-40:]} == {b"afterwards"}


@pytest.mark.parametrize("lost", [0, 1, 2, 3])
def test_every_single_sync_is_needed(tmp_path: Path, lost: int) -> None:
    root, path = tmp_path / "root", str(tmp_path / "root" / "a" / "file")
    root.mkdir()
    operations = recorded(lambda: disk.write_file(path, b"data", durable=True))
    syncs = [operation for operation in operations if isinstance(operation, Synced)]
    assert len(syncs) == 3
    kept = [operation for operation in operations if lost == 3 or operation is not syncs[lost]]
    after = trees(kept, root, tmp_path)[-40:]
    assert all(tree.get("a/file") == b"data" for tree in after) == (lost == 3)


def test_a_killed_process_does_nothing_afterwards(tmp_path: Path) -> None:
    recorder = Recorder()
    recorder.kill_at = 3
    with recorder.recording():
        for name in ("one", "two"):
            with pytest.raises(Killed):
                disk.write_file(str(tmp_path / name), b"data", durable=True)
    assert len(recorder.operations) == 3
    assert left(tmp_path) == {f"one.{os.getpid()}.tmp": b"data"}
