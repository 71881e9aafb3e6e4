"""Folders with pickles are created private, and refused if someone else could have written to them."""

from __future__ import annotations

import logging
import os
import stat
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from midstream import Flow, ListSource, NoopSink
from midstream.checkpoint.location import Checkpoint
from midstream.cli.app import app
from midstream.errors import StateError
from midstream.state.local_folder import check_local_state, own_local_folder
from midstream.storage.ownership import make_private, others_can_write, others_can_write_checkpoint
from midstream.testing import run_local

NOBODY = 65_534


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def give_away(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the folder another user's: change its owner if this user may, otherwise pretend to be another user."""
    if os.geteuid() == 0:
        os.chown(path, NOBODY, -1)
    else:
        me = os.geteuid()
        monkeypatch.setattr(os, "geteuid", lambda: me + 1)


@pytest.fixture
def folder(tmp_path):
    made = tmp_path / "folder"
    made.mkdir(mode=0o755)
    return made


def flow() -> Flow:
    def count(key: Any, row: Any, state: Any) -> Any:
        state.set(state.get(0) + 1)
        return row

    built = Flow("counts")
    rows = built.source("in", ListSource([[{"n": 1}]], "n int"))
    rows.key_by("by_n", "n").process("count", count).sink("out", NoopSink())
    return built


# ── who can write ─────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("mode", [0o700, 0o755, 0o711])
def test_a_folder_that_only_this_user_can_write_passes(folder, mode):
    folder.chmod(mode)
    assert others_can_write(str(folder)) is None


@pytest.mark.parametrize("mode", [0o777, 0o757, 0o702])
def test_a_world_writable_folder_is_reported_with_its_mode(folder, mode):
    folder.chmod(mode)
    assert others_can_write(str(folder)) == f"can be written by everybody (mode {mode:04o})"


def test_a_sticky_folder_is_safe_only_as_a_parent(folder):
    folder.chmod(0o1777)
    assert others_can_write(str(folder)) == "can be written by everybody (mode 1777)"
    assert others_can_write(str(folder), sticky_is_safe=True) is None


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to another group")
def test_a_shared_group_counts_as_others(folder):
    os.chown(folder, -1, 12_345)
    folder.chmod(0o770)
    assert others_can_write(str(folder)) == "can be written by the group 12345 (mode 0770)"


def test_a_folder_of_another_user_is_reported_with_any_mode(folder, monkeypatch):
    folder.chmod(0o700)
    give_away(folder, monkeypatch)
    found = others_can_write(str(folder))
    assert found is not None
    assert found.startswith("belongs to ")


def test_subfolders_of_a_checkpoint_are_checked_if_others_can_reach_them(folder):
    (folder / "blobs").mkdir()
    (folder / "blobs").chmod(0o777)
    told = "has a folder 'blobs' that can be written by everybody (mode 0777)"
    assert others_can_write_checkpoint(str(folder)) == told
    folder.chmod(0o700)
    assert others_can_write_checkpoint(str(folder)) is None


def test_symbolic_links_are_followed(folder, tmp_path):
    folder.chmod(0o777)
    (tmp_path / "link").symlink_to(folder)
    assert others_can_write(str(tmp_path / "link")) is not None


def test_only_the_last_folder_is_made_private_and_existing_ones_are_unchanged(tmp_path):
    make_private(str(tmp_path / "a" / "b"))
    assert mode_of(tmp_path / "a" / "b") == 0o700
    assert mode_of(tmp_path / "a") == 0o777 & ~current_umask()
    (tmp_path / "a" / "b").chmod(0o755)
    make_private(str(tmp_path / "a" / "b"))
    assert mode_of(tmp_path / "a" / "b") == 0o755


def current_umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


# ── checkpoints ───────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_new_checkpoint_is_private_to_its_owner(tmp_path, caplog):
    checkpoint = Checkpoint.look(str(tmp_path / "jobs" / "one"), flow().graph)
    checkpoint.claim()
    checkpoint.release()
    assert mode_of(tmp_path / "jobs" / "one") == 0o700
    assert caplog.text == ""


def test_an_existing_checkpoint_keeps_its_mode_and_is_warned_about_once(folder, caplog):
    caplog.set_level(logging.WARNING, "midstream")
    folder.chmod(0o777)
    for _ in range(2):
        checkpoint = Checkpoint.look(str(folder), flow().graph)
        checkpoint.claim()
        checkpoint.release()
    assert mode_of(folder) == 0o777
    [said] = [record.getMessage() for record in caplog.records]
    assert said.startswith(f"the checkpoint {str(folder)!r} can be written by everybody (mode 0777). It holds")


@pytest.fixture
def kept(tmp_path):
    """The checkpoint of a finished job."""
    run_local(flow(), checkpoint=str(tmp_path / "kept"))
    return tmp_path / "kept"


def state(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["state", *arguments])


def test_state_of_a_folder_that_others_can_write_is_shown_only_on_request(kept):
    assert state(str(kept)).exit_code == 0
    kept.chmod(0o777)
    for arguments in ((str(kept),), (f"file://{kept}", "count"), (str(kept), "count", "1")):
        refused = state(*arguments)
        assert refused.exit_code == 1
        assert "can be written by everybody (mode 0777)" in refused.output
        assert "a pickle can run any code as you" in refused.output
        assert "--trust" in refused.output
        shown = state(*arguments, "--trust")
        assert shown.exit_code == 0
        assert "count" in shown.output


def test_state_in_another_users_folder_is_refused_before_anything_is_read(kept, monkeypatch):
    give_away(kept, monkeypatch)
    for program in (kept / "blobs").glob("*/*"):
        program.write_bytes(b"would be unpickled, if its digest were right")
    refused = state(str(kept), "count")
    assert refused.exit_code == 1
    assert "belongs to" in refused.output
    assert "do not match its name" in state(str(kept), "count", "--trust").output, "with --trust it is read"


# ── copies of state on a worker's disk ────────────────────────────────────────────────────────────────────────────


def test_the_local_state_folder_of_a_job_is_private(tmp_path):
    own = own_local_folder(str(tmp_path / "fast" / "disk"), "job1")
    assert own == str(tmp_path / "fast" / "disk" / "job1")
    assert mode_of(Path(own)) == 0o700
    Path(own).chmod(0o755)  # as earlier versions created it
    assert mode_of(Path(own_local_folder(str(tmp_path / "fast" / "disk"), "job1"))) == 0o700


def test_a_world_writable_local_state_folder_is_refused(folder):
    folder.chmod(0o777)
    with pytest.raises(StateError, match=r"local_state='.*' can be written by everybody \(mode 0777\).*mode 700"):
        check_local_state(str(folder))
    with pytest.raises(StateError, match="can be written by everybody"):
        own_local_folder(str(folder), "job1")
    assert list(folder.iterdir()) == []


def test_a_local_state_folder_of_another_user_is_refused(folder, monkeypatch):
    give_away(folder, monkeypatch)
    with pytest.raises(StateError, match=r"local_state='.*' belongs to .*, while this process runs as"):
        check_local_state(str(folder))


def test_a_sticky_folder_is_accepted_unless_another_user_created_the_jobs_folder(folder):
    folder.chmod(0o1777)
    own = Path(own_local_folder(str(folder), "job1"))
    own.chmod(0o777)
    with pytest.raises(StateError, match=r"can be written by everybody.*remove the folder, or set another"):
        own_local_folder(str(folder), "job1")


def test_a_local_state_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StateError, match="cannot be used"):
        own_local_folder(str(tmp_path / "file"), "job1")
