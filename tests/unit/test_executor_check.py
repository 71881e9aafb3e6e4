"""What an executor finds when it is asked, before a job starts, whether it can do its part."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from midstream import FileSink, Flow, ListSource, committed_files
from midstream.checkpoint.identity import IDENTITY
from midstream.checkpoint.sink_marker import MARKER
from midstream.control.channel import Server
from midstream.control.messages import Accepted
from midstream.errors import CheckpointError, SetupError
from midstream.runtime.spark import executor_check
from midstream.runtime.spark.executor_check import Answer, SharedFolder, look, proven, require_able
from midstream.testing import run_local


@pytest.fixture
def server() -> Iterator[Server]:
    with Server(lambda peer, message: [(peer, Accepted())]) as server:
        yield server


def answer(server: Server, *folders: SharedFolder) -> Answer:
    [found] = look(server.address, folders, iter([0]))
    return found


def test_an_executor_that_reaches_all_says_so(server: Server, tmp_path: Path):
    with proven("the checkpoint", str(tmp_path / "new" / "job"), IDENTITY) as folder:
        assert (tmp_path / "new" / "job").stat().st_mode & 0o777 == 0o700
        found = answer(server, folder)
    assert (found.unreached, found.unshared) == (None, ())
    assert list(tmp_path.iterdir()) == [], "the folder is as it was: it is not there"
    require_able(found, server.address)


def test_an_executor_with_another_folder_in_the_place_says_so(server: Server, tmp_path: Path):
    with proven("the checkpoint", str(tmp_path), IDENTITY) as folder:
        [file] = tmp_path.iterdir()
        content = file.read_bytes()
        file.unlink()
        found = answer(server, folder)
        assert [what for what, _ in found.unshared] == ["the checkpoint"]
        with pytest.raises(CheckpointError, match=r"^the checkpoint is not shared: executor .* cannot read there what"):
            require_able(found, server.address)
        file.write_bytes(content + b"!")
        assert "finds another midstream.json" in dict(answer(server, folder).unshared)["the checkpoint"]


def test_a_folder_of_a_job_is_recognised_by_the_file_that_names_its_owner(server: Server, tmp_path: Path):
    (tmp_path / IDENTITY).write_text("mine")
    with proven("the checkpoint", str(tmp_path), IDENTITY) as folder:
        assert folder.proof == IDENTITY
        assert answer(server, folder).unshared == ()
        (tmp_path / IDENTITY).write_text("another job's")
        assert answer(server, folder).unshared != ()
    assert [path.name for path in tmp_path.iterdir()] == [IDENTITY]


def test_an_executor_that_may_not_write_says_so(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    with proven("the checkpoint", str(tmp_path), IDENTITY) as folder:
        monkeypatch.setattr(executor_check, "write_atomically", refuse)  # root may write anywhere
        found = answer(server, folder)
    assert "can read there, but not write ([Errno 13]" in dict(found.unshared)["the checkpoint"]


def test_an_executor_without_a_way_to_the_driver_says_so(tmp_path: Path):
    with Server(lambda peer, message: [(peer, Accepted())]) as server:
        address = server.address
    [found] = look(address, (), iter([0]))
    with pytest.raises(
        SetupError, match=r"cannot reach the coordinator .*nobody answers there.*spark\.midstream\.port"
    ):
        require_able(found, address)


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path):
    (tmp_path / "file").touch()
    with (
        pytest.raises(CheckpointError, match=r"^the checkpoint cannot be used: "),
        proven("the checkpoint", str(tmp_path / "file" / "job"), IDENTITY),
    ):
        pass


def test_files_that_a_killed_check_leaves_behind_are_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    flow = Flow("numbers")
    flow.source("in", ListSource([[{"n": 1}]], "n int")).sink("out", FileSink(tmp_path / "out"))
    monkeypatch.setattr(executor_check, "_remove", lambda fs, path: None)
    for name, owner in (("job", IDENTITY), ("out", MARKER)):
        with proven(name, str(tmp_path / name), owner):
            pass
        assert len(os.listdir(tmp_path / name)) == 1
    run_local(flow, checkpoint=str(tmp_path / "job"))
    assert committed_files(str(tmp_path / "out")) != []
