"""The blob store: blobs are named by content, written completely or not at all, and damage is detected."""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path

import pyarrow.fs as pafs
import pytest

from midstream.errors import CheckpointError
from midstream.ids import Digest
from midstream.storage import disk
from midstream.storage.blobs import Blob, BlobStore, filesystem_of, write_atomically
from tests.power_loss import Recorder, Synced


@pytest.fixture
def store(tmp_path: Path) -> BlobStore:
    return BlobStore(str(tmp_path / "blobs"))


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def test_a_stored_blob_can_be_fetched(store):
    blobs = [Blob.of(data) for data in (b"", b"model", bytes(range(256)) * 10_000)]
    assert [store.get(store.put(blob)) for blob in blobs] == [blob.data for blob in blobs]


def test_a_blob_is_stored_once_under_its_digest(store, tmp_path):
    blob = Blob.of(b"model")
    assert store.put(blob) == store.put(Blob.of(b"model")) == blob.digest
    assert files(tmp_path) == [tmp_path / "blobs" / blob.digest[:2] / blob.digest]


def test_an_existing_blob_is_not_written_again(store, tmp_path):
    store.put(Blob.of(b"model"))
    [path] = files(tmp_path)
    os.utime(path, (0, 0))
    store.put(Blob.of(b"model"))
    assert path.stat().st_mtime == 0


@pytest.mark.parametrize("torn", [b"", b"mod", b"model and more", bytes(5)])
def test_a_torn_blob_is_written_again(store, tmp_path, torn):
    digest = store.put(Blob.of(b"model"))
    files(tmp_path)[0].write_bytes(torn)
    again = BlobStore(store.location)
    assert again.put(Blob.of(b"model")) == digest
    assert again.get(digest) == b"model"


def test_a_removed_blob_is_written_again_by_the_same_store(store, tmp_path):
    digest = store.put(Blob.of(b"model"))
    files(tmp_path)[0].unlink()
    store.put(Blob.of(b"model"))
    assert store.get(digest) == b"model"


def test_content_is_compared_once_per_process_and_size_always(store, tmp_path):
    blob = Blob.of(b"model")
    store.put(blob)
    files(tmp_path)[0].write_bytes(b"MODEL")
    store.put(blob)
    assert files(tmp_path)[0].read_bytes() == b"MODEL"
    files(tmp_path)[0].write_bytes(b"mod")
    store.put(blob)
    assert store.get(blob.digest) == b"model"


def test_two_stores_on_one_folder_see_the_same_blobs(store):
    digest = store.put(Blob.of(b"model"))
    assert BlobStore(f"file://{store.location}").get(digest) == b"model"


@pytest.mark.parametrize("damage", [b"", b"mode", b"modeL", b"model."])
def test_damage_is_detected(store, tmp_path, damage):
    digest = store.put(Blob.of(b"model"))
    files(tmp_path)[0].write_bytes(damage)
    with pytest.raises(
        CheckpointError,
        match=rf"blob {digest} .* is damaged: its {len(damage)} bytes do not match.*Restore .*changes='drop'",
    ):
        store.get(digest)


def test_a_missing_blob_names_the_location(store):
    with pytest.raises(
        CheckpointError, match=r"blob abcdef0123456789 cannot be read from .*storage that the driver and all"
    ):
        store.get(Digest("abcdef0123456789"))


def test_blobs_put_together_are_synced_once_when_the_block_ends(tmp_path):
    store, recorder = BlobStore(str(tmp_path / "blobs")), Recorder()
    blobs = [Blob.of(bytes([i])) for i in range(3)]
    with recorder.recording():
        with store.together():
            for blob in blobs:
                store.put(blob)
            assert not any(isinstance(each, Synced) and not each.is_folder for each in recorder.operations)
        paths = {str(tmp_path / "blobs" / blob.digest[:2] / blob.digest) for blob in blobs}
        synced = [each.path for each in recorder.operations if isinstance(each, Synced)]
        assert paths <= set(synced)
        assert {os.path.dirname(path) for path in paths} <= set(synced), "and their names"
        assert synced[-1] == str(tmp_path / "blobs"), "and the names of their folders"
        count = len(recorder.operations)
        store.put(blobs[0])
        assert len(recorder.operations) == count, "nothing to do"


def test_blobs_of_a_block_can_be_synced_by_another_thread_and_only_once(tmp_path):
    store, recorder, blob = BlobStore(str(tmp_path)), Recorder(), Blob.of(b"model")
    synced = Synced(str(tmp_path / blob.digest[:2] / blob.digest), is_folder=False)
    with recorder.recording():
        with store.together() as put, store.together() as inner:
            assert inner is put, "a block within another one is part of it"
            store.put(blob)
            other = threading.Thread(target=put.sync)
            other.start()
            other.join(60)
            assert recorder.operations.count(synced) == 1
        put.sync()
        assert recorder.operations.count(synced) == 1


def test_a_sync_that_failed_once_fails_for_everyone_who_needs_it(tmp_path, monkeypatch):
    def broken(_):
        raise OSError(5, "Input/output error")

    store, blob = BlobStore(str(tmp_path)), Blob.of(b"model")
    with contextlib.suppress(KeyError), store.together() as put:
        store.put(blob)
        raise KeyError
    with monkeypatch.context() as patched:
        patched.setattr(disk, "_sync_path", broken)
        with pytest.raises(CheckpointError, match="cannot sync blobs in"):
            put.sync()
    with pytest.raises(CheckpointError, match=r"cannot sync blobs in .*Input/output error"):
        put.sync()  # the system reports an error once
    recorder = Recorder()
    with recorder.recording():
        store.put(blob)
    assert [each for each in recorder.operations if isinstance(each, Synced)], "it is not taken for synced"


def test_without_durability_nothing_is_synced(tmp_path):
    recorder, blob = Recorder(), Blob.of(b"model")
    with recorder.recording():
        store = BlobStore(str(tmp_path), durable=False)
        with store.together() as put:
            store.put(blob)
            put.sync()
    assert not [each for each in recorder.operations if isinstance(each, Synced)]


def test_blobs_put_in_a_block_are_not_read_from_the_disk_before_its_end(tmp_path):
    store, blob = BlobStore(str(tmp_path)), Blob.of(b"model")
    with store.together():
        store.put(blob)
        (tmp_path / blob.digest[:2] / blob.digest).rename(tmp_path / "elsewhere")
        assert store.get(blob.digest) == b"model"
        (tmp_path / "elsewhere").rename(tmp_path / blob.digest[:2] / blob.digest)
    assert store.get(blob.digest) == b"model"
    (tmp_path / blob.digest[:2] / blob.digest).unlink()
    with pytest.raises(CheckpointError, match="cannot be read"):
        store.get(blob.digest)


def test_a_blob_that_another_process_left_unsynced_is_synced_by_the_next(tmp_path):
    blob = Blob.of(b"model")
    BlobStore(str(tmp_path), durable=False).put(blob)
    path, recorder = str(tmp_path / blob.digest[:2] / blob.digest), Recorder()
    with recorder.recording():
        BlobStore(str(tmp_path)).put(blob)
    assert Synced(path, is_folder=False) in recorder.operations
    assert Synced(os.path.dirname(path), is_folder=True) in recorder.operations


def test_a_blob_that_was_removed_is_synced_again(tmp_path):
    store, blob, recorder = BlobStore(str(tmp_path)), Blob.of(b"model"), Recorder()
    with recorder.recording():
        store.put(blob)
        path = tmp_path / blob.digest[:2] / blob.digest
        path.unlink()
        store.put(blob)
    assert recorder.operations.count(Synced(str(path), is_folder=False)) == 2


def test_blobs_of_a_block_that_fails_are_synced_when_they_are_put_again(tmp_path):
    store, blob, recorder = BlobStore(str(tmp_path)), Blob.of(b"model"), Recorder()
    path = str(tmp_path / blob.digest[:2] / blob.digest)
    with recorder.recording():
        with contextlib.suppress(KeyError), store.together():
            store.put(blob)
            raise KeyError
        assert Synced(path, is_folder=False) not in recorder.operations
        store.put(blob)
    assert Synced(path, is_folder=False) in recorder.operations


def test_a_sync_that_fails_is_a_clear_error(tmp_path, monkeypatch):
    def broken(_):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fsync", broken)
    with pytest.raises(CheckpointError, match=r"cannot sync blobs in .*Input/output error"):
        BlobStore(str(tmp_path)).put(Blob.of(b"model"))


def test_a_write_that_fails_leaves_nothing(tmp_path, monkeypatch):
    def full(*_):
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "replace", full)
    fs, path = filesystem_of(str(tmp_path / "x" / "file"))
    with pytest.raises(CheckpointError, match=r"cannot write '.*file': no space left on device"):
        write_atomically(fs, path, b"data")
    assert files(tmp_path) == []


def test_a_write_replaces_an_existing_file(tmp_path):
    fs, path = filesystem_of(str(tmp_path / "file"))
    write_atomically(fs, path, b"one")
    write_atomically(fs, path, b"two")
    assert Path(path).read_bytes() == b"two"
    assert files(tmp_path) == [Path(path)]


def test_plain_paths_are_local_and_become_absolute(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    fs, path = filesystem_of("job/blobs")
    assert isinstance(fs, pafs.LocalFileSystem)
    assert path == str(tmp_path / "job" / "blobs")
    assert filesystem_of(f"file://{tmp_path}")[1] == str(tmp_path)


def test_an_unknown_file_system_is_an_error():
    with pytest.raises(CheckpointError, match=r"cannot reach 'nosuch://bucket/x'.*; found 'nosuch'"):
        filesystem_of("nosuch://bucket/x")
