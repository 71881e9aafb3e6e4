"""Checkpoints on fsspec file systems: they work as on a local disk, or are refused with a reason."""

from __future__ import annotations

import posixpath
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pyarrow.fs as pafs
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from midstream import FileSink, Flow, ListSource, MemorySink, agg
from midstream.checkpoint.inspection import read_state
from midstream.checkpoint.location import Checkpoint
from midstream.errors import CheckpointError
from midstream.ids import Epoch, PartitionId, Run
from midstream.runtime.spark.storage_check import require_reachable
from midstream.state import lineage
from midstream.state.files import Author, FileKind, StateFiles, table_of
from midstream.storage.blobs import Blob, BlobStore, below, filesystem_of, write_atomically
from midstream.storage.fsspec_bridge import FsspecHandler
from midstream.testing import Faults, run_local

EPOCHS = [[{"k": f"k{(7 * epoch + i) % 11}", "n": i} for i in range(12)] for epoch in range(8)]


@pytest.fixture(autouse=True)
def empty_memory() -> Iterator[None]:
    yield
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]


@pytest.fixture(params=["memory", "dir of memory", "dir of local"])
def location(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    name = uuid.uuid4().hex
    return {
        "memory": f"memory://{name}/my job",
        "dir of memory": f"dir://job::memory://{name}",
        "dir of local": f"dir://job::file://{tmp_path}/fsspec",  # the one that renames
    }[request.param]


def add_up(key: Any, row: dict[str, Any], state: Any) -> dict[str, Any]:
    state.set(state.get(0) + row["n"])
    return {"k": key, "n": state.get()}


def life(epochs: list[list[dict[str, Any]]], checkpoint: str, partitions: int) -> dict[int, list[str]]:
    """The output of one start of a job, epoch by epoch."""
    flow, counts, sums = Flow("counting"), MemorySink(), MemorySink()
    keyed = flow.source("in", ListSource(epochs, "k string, n int")).key_by("by k", "k")
    keyed.aggregate("count", n=agg.count()).sink("counts", counts)
    keyed.process("sum", add_up).sink("sums", sums)
    run_local(flow, checkpoint=checkpoint, partitions=partitions, seed=3, faults=Faults(crash=0.02, crash_driver=0.02))
    return {
        epoch: sorted(map(str, counts.tables[epoch].to_pylist() + sums.tables[epoch].to_pylist()))
        for epoch in counts.tables
    }


def files_below(location: str) -> list[str]:
    fs, root = filesystem_of(location)
    found = fs.get_file_info(pafs.FileSelector(root, recursive=True))
    return sorted(posixpath.relpath(info.path, root) for info in found if info.is_file)


# A whole job


@pytest.mark.long
def test_a_job_works_on_fsspec_as_on_a_local_disk(location, tmp_path, monkeypatch):
    monkeypatch.setattr(lineage, "MIN_ROWS", 3)
    monkeypatch.setattr(lineage, "MERGED_AT_ONCE", 2)
    local = str(tmp_path / "local")
    for epochs, partitions in ((EPOCHS[:5], 2), (EPOCHS[5:], 3)):
        assert life(epochs, location, partitions) == life(epochs, local, partitions)
    for operator in ("count", "sum"):
        assert read_state(location, operator).sort_by("k").equals(read_state(local, operator).sort_by("k"))

    names = files_below(location)
    assert [name for name in names if name.startswith("epochs/")] == [f"epochs/{n:010d}" for n in range(8)]
    assert {name.split("/")[0] for name in names} == {"midstream.json", "blobs", "epochs", "state"}
    assert [name for name in names if name.endswith(".tmp")] == []
    assert {name.split("-")[-2] for name in names if name.startswith("state/")} == {"delta", "merged", "snapshot"}


def test_a_checkpoint_on_fsspec_belongs_to_one_flow(location):
    life(EPOCHS[:1], location, 1)
    flow = Flow("other")
    flow.source("in", ListSource([[]], "n int")).sink("out", MemorySink())
    with pytest.raises(CheckpointError, match="belongs to the flow 'counting', not to 'other'"):
        run_local(flow, checkpoint=location)


def test_damage_and_loss_on_fsspec_are_errors(location):
    blobs, files = BlobStore(below(location, "blobs")), StateFiles(below(location, "state"))
    digest = blobs.put(Blob.of(b"model"))
    ref = files.write(
        table_of([b"\x02\x00a"], [b"1"]), FileKind.DELTA, Author("count", Epoch(0), Run(0), PartitionId(0), 0)
    )
    assert (blobs.get(digest), files.read(ref).num_rows, files.names()) == (b"model", 1, [ref.name])

    fs, root = filesystem_of(location)
    write_atomically(fs, f"{root}/blobs/{digest[:2]}/{digest}", b"mode")
    with pytest.raises(CheckpointError, match="is damaged: its 4 bytes do not match its name"):
        blobs.get(digest)
    files.remove([ref.name, ref.name])
    assert files.names() == []
    with pytest.raises(CheckpointError, match=r"is missing from .*Restore it from a copy"):
        files.read(ref)


def test_a_local_fsspec_location_is_treated_as_local_and_locked(tmp_path):
    flow = Flow("counting")
    flow.source("in", ListSource([[]], "n int")).sink("out", MemorySink())
    first, second = (Checkpoint.look(f"local://{tmp_path}/my job", flow.graph) for _ in range(2))
    assert first.spark_location == f"file://{tmp_path}/my job/spark"
    first.claim()
    with pytest.raises(CheckpointError, match="is in use by process"):
        second.claim()
    first.release()


def test_a_path_below_a_chain_is_below_its_first_link():
    assert below("dir://a::memory://b", "c") == "dir://a/c::memory://b"
    assert below("/data/x::y", "c") == "/data/x::y/c"
    assert filesystem_of("dir://a/c::memory://b")[1] == "a/c"


# All or nothing


class Memory(MemoryFileSystem):  # type: ignore[misc]  # fsspec has no annotations
    """A store without a rename, to build others from."""

    cachable = False


class NoReplacing(Memory):
    """Has a rename that refuses to replace a file: with an error, or silently."""

    silent = False

    def mv(self, path1: str, path2: str) -> None:
        if not self.exists(path2):
            super().mv(path1, path2)
        elif not self.silent:
            raise FileExistsError(path2)


class SilentlyNotReplacing(NoReplacing):
    silent = True


class NeverMoving(NoReplacing):
    def mv(self, path1: str, path2: str) -> None:
        return None


def system(kind: type[Memory]) -> pafs.PyFileSystem:
    return pafs.PyFileSystem(FsspecHandler(kind()))


@pytest.mark.parametrize("kind", [Memory, NoReplacing, SilentlyNotReplacing])
def test_a_write_replaces_an_existing_file(kind):
    fs = system(kind)
    for data in (b"one", b"two"):
        write_atomically(fs, "/job/file", data)
        assert list(MemoryFileSystem.store) == ["/job/file"]
        assert fs.open_input_stream("/job/file").read() == data


def test_a_rename_that_does_nothing_is_an_error_and_leaves_nothing():
    with pytest.raises(CheckpointError, match=r"cannot write '/job/file': .*does not exist after"):
        write_atomically(system(NeverMoving), "/job/file", b"one")
    assert list(MemoryFileSystem.store) == []


def test_files_are_renamed_if_possible_and_otherwise_written_under_their_own_name(tmp_path):
    opened: list[str] = []

    class Watched(Memory):
        def open(self, path: str, mode: str = "rb", **options: Any) -> Any:
            opened.append(path)
            return super().open(path, mode, **options)

    class Renaming(Watched, NoReplacing):
        pass

    write_atomically(system(Watched), "/job/a", b"data")
    assert opened == ["/job/a"]
    opened.clear()
    write_atomically(system(Renaming), "/job/b", b"data")
    assert [path.endswith(".tmp") for path in opened] == [True]
    assert [
        filesystem_of(uri)[0].handler.renames for uri in ("dir://x::memory://y", f"dir://x::file://{tmp_path}")
    ] == [False, True]


# Concurrent writers


def test_writes_of_others_are_seen_despite_cached_listings():
    class Remembering(Memory):
        def find(self, path: str, **options: Any) -> Any:
            if path not in self.dircache:
                self.dircache[path] = super().find(path, **options)
            return self.dircache[path]

        def invalidate_cache(self, path: str | None = None) -> None:
            self.dircache.clear()

    fs, selector = system(Remembering), pafs.FileSelector("/job")
    MemoryFileSystem().pipe_file("/job/a", b"")
    assert len(fs.get_file_info(selector)) == 1
    MemoryFileSystem().pipe_file("/job/b", b"")
    assert len(fs.get_file_info(selector)) == 2


def test_errors_of_a_stores_client_become_checkpoint_errors():
    class Locked(Memory):
        protocol = "locked"

        def info(self, path: str, **options: Any) -> Any:
            raise RuntimeError("no credentials")

        def pipe_file(self, path: str, value: bytes, **options: Any) -> None:
            raise RuntimeError("no credentials")

    fsspec.register_implementation("locked", Locked, clobber=True)
    with pytest.raises(CheckpointError, match=r"the checkpoint 'locked://x' cannot be read: .*no credentials"):
        Checkpoint.of_any_flow("locked://x")
    with pytest.raises(CheckpointError, match=r"cannot write '/x/y': RuntimeError: no credentials"):
        write_atomically(filesystem_of("locked://x")[0], "/x/y", b"")


# Refusals


def test_an_unknown_scheme_is_refused():
    with pytest.raises(
        CheckpointError,
        match=r"cannot reach 'nosuch://bucket/x': pyarrow says \"Unrecognized.*fsspec says \"Protocol not known: nosuch"
        r".*pyarrow.fs or fsspec knows; found 'nosuch'$",
    ):
        filesystem_of("nosuch://bucket/x")


def test_without_fsspec_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(CheckpointError, match=r"cannot reach 'memory://x'.*pip install 'midstream\[fsspec\]' and the"):
        filesystem_of("memory://x")


def test_a_missing_file_system_package_is_named():
    fsspec.register_implementation("lacking", "no_such_module.System", errtxt="Install lackingfs to reach it")
    with pytest.raises(CheckpointError, match=r"says \"Install lackingfs to reach it\".*pip install the package that"):
        filesystem_of("lacking://x")


@pytest.mark.parametrize("chain", ["simplecache://x::memory://y", "dir://x::simplecache://y::memory://z"])
def test_a_cache_is_refused(chain):
    with pytest.raises(CheckpointError, match="may answer from its cache, so that writes of others are not seen"):
        filesystem_of(chain)


def test_a_chain_whose_first_link_has_no_path_is_refused():
    with pytest.raises(CheckpointError, match=r"the first link must have the path, as in 'dir://folder::…'"):
        filesystem_of("dir::memory://x")


@pytest.mark.parametrize("location", ["file:///data/job?a=1", "s3a://bucket/job?region=eu-central-1"])
def test_options_in_a_location_are_refused(location):
    # Only pyarrow supports options, so this also shows that it knows Hadoop's name for S3.
    with pytest.raises(CheckpointError, match=r"has '(a=1|region=eu-central-1)' after a '\?'. Use '(file|s3a)://"):
        filesystem_of(location)


def test_a_location_that_spark_cannot_reach_is_refused_before_any_write(tmp_path):
    def knows(scheme: str) -> bool:
        return scheme in {"file", "hdfs"}

    flow = Flow("counting")
    flow.source("in", ListSource([[]], "n int")).sink("out", MemorySink())
    with pytest.raises(
        CheckpointError, match=r"Spark cannot reach the checkpoint 'memory://x': Hadoop has no file sys"
    ):
        require_reachable(flow.graph, Checkpoint.look("memory://x", flow.graph), knows)
    require_reachable(flow.graph, Checkpoint.look(f"local://{tmp_path}", flow.graph), knows)

    flow = Flow("counting")
    flow.source("in", ListSource([[]], "n int")).sink("out", FileSink("memory://out"))
    with pytest.raises(CheckpointError, match=r"cannot reach the folder 'memory://out' of sink 'out': .* 'memory'"):
        require_reachable(flow.graph, Checkpoint.look(str(tmp_path), flow.graph), knows)
