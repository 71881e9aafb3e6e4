"""Savepoints, forks and rewinds refuse what they cannot do, before anything has changed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from midstream import Flow, ListSource, MemorySink, agg, delete_savepoint, fork, rewind, savepoints, take_savepoint
from midstream.checkpoint.location import Checkpoint
from midstream.checkpoint.spark_files import SparkFiles
from midstream.cli.app import app
from midstream.errors import CheckpointError
from midstream.ids import Epoch
from midstream.server.client import JobClient
from midstream.testing import run_local
from tests.served import StandInJob, served


def counted(epochs: int) -> Flow:
    flow = Flow("counts")
    rows = flow.source("in", ListSource([[{"k": "a"}]] * epochs, "k string")).key_by("by", "k")
    rows.aggregate("count", n=agg.count()).sink("out", MemorySink())
    return flow


def live(folder: Path, epochs: int) -> str:
    run_local(counted(epochs), checkpoint=str(folder))
    return str(folder)


@pytest.fixture
def job(tmp_path: Path) -> str:
    """Epochs 0 to 6, with a savepoint of epoch 2."""
    live(tmp_path / "job", 3)
    take_savepoint(str(tmp_path / "job"), "before tuning")
    return live(tmp_path / "job", 4)


def content(folder: str) -> dict[str, Any]:
    names = (path for path in Path(folder).rglob("*") if path.is_file() and path.name != "lock")
    return {str(path.relative_to(folder)): (path.read_bytes(), path.stat().st_mtime_ns) for path in names}


def assert_refused(folder: str, message: str, do: Any, *arguments: Any) -> None:
    before = content(folder)
    with pytest.raises(CheckpointError, match=re.escape(message)):
        do(*arguments)
    assert content(folder) == before, "nothing has changed"


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("", "it is empty"),
        ("  ", "it is empty"),
        (" x", "it begins or ends with a space"),
        ("a\nb", "characters that cannot be printed"),
        ("12", "it could be the number of an epoch"),
        ("a@b", "'@' stands between"),
        ("a/b", "'/' within a path"),
        ("x" * 101, "it has 101 characters"),
    ],
)
def test_a_name_that_cannot_be_used_is_refused(job, name, why):
    assert_refused(job, why, take_savepoint, job, name)


def test_any_other_name_can_be_used(job):
    for name in ("a?b", "..", "ä" * 100, "Before tuning", "x.json"):
        take_savepoint(job, name)
    assert {each.name for each in savepoints(job)} >= {"a?b", "..", "ä" * 100, "Before tuning", "x.json"}
    assert {path.parent.name for path in Path(job).rglob("*.json") if "savepoints" in str(path)} == {"savepoints"}


def test_a_name_that_is_taken_is_refused(job):
    assert_refused(
        job,
        "there is a savepoint 'before tuning' already, of epoch 2; delete it first, or use another name",
        take_savepoint,
        job,
        "before tuning",
    )


def test_an_unknown_savepoint_is_refused_and_those_that_exist_are_listed(job, tmp_path):
    told = "there is no savepoint 'befor tuning'"
    listed = "there are 'before tuning' (epoch 2). Did you mean 'before tuning'?"
    for do, arguments in (
        (delete_savepoint, (job, "befor tuning")),
        (rewind, (job, "befor tuning")),
        (fork, (job, "befor tuning", str(tmp_path / "new"))),
    ):
        assert_refused(job, told, do, *arguments)
        assert_refused(job, listed, do, *arguments)
    assert not (tmp_path / "new").exists()


def test_without_a_committed_epoch_there_is_nothing_to_save_or_rewind(tmp_path):
    folder = str(tmp_path / "job")
    checkpoint = Checkpoint.look(folder, counted(1).graph)
    checkpoint.claim()
    checkpoint.release()
    assert_refused(folder, "no epoch has been committed", take_savepoint, folder, "x")
    assert_refused(folder, "no epoch has been committed", rewind, folder, 0)


def test_a_folder_that_is_not_a_checkpoint_is_refused(tmp_path):
    for do in (take_savepoint, rewind, delete_savepoint):
        assert_refused(str(tmp_path), "is not the checkpoint of a job", do, str(tmp_path), "x")
    assert_refused(str(tmp_path), "is not the checkpoint of a job", fork, str(tmp_path), "x", str(tmp_path / "new"))


@pytest.mark.parametrize(
    ("to", "why"),
    [
        (9, "was never committed. It can be rewound to epochs"),
        (-1, "was never committed"),
        (6, "stands after epoch 6, so it cannot be rewound to epoch 6"),
    ],
)
def test_a_rewind_to_an_impossible_epoch_is_refused(job, to, why):
    assert_refused(job, why, rewind, job, to)


def test_an_epoch_that_was_swept_is_refused_and_existing_ones_are_listed(job):
    Path(job, "epochs", f"{3:010d}").unlink()
    told = "was swept: it is no longer whole. It can be rewound to epochs 0, 1, 2, 4, 5 and savepoints 'before tuning'"
    assert_refused(job, told, rewind, job, 3)


def test_a_running_job_is_not_touched(job, tmp_path):
    holder = Checkpoint.of_any_flow(job)
    holder.claim()
    for do, argument, instead in (
        (rewind, 2, "Stop it before it is rewound"),
        (take_savepoint, "x", "While it runs: job.savepoint('x')"),
        (delete_savepoint, "before tuning", "While it runs: job.delete_savepoint('before tuning')"),
    ):
        assert_refused(job, "a job is running on the checkpoint", do, job, argument)
        assert_refused(job, instead, do, job, argument)
    fork(job, "before tuning", str(tmp_path / "new"))
    holder.release()
    assert Checkpoint.of_any_flow(str(tmp_path / "new")).identity.forked_from.startswith("before tuning of job ")


def test_a_fork_needs_an_empty_folder(job, tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    (tmp_path / "file").write_text("mine")
    assert_refused(job, "is not empty (notes.txt)", fork, job, "before tuning", str(tmp_path / "full"))
    assert_refused(job, "is a file", fork, job, "before tuning", str(tmp_path / "file"))
    assert_refused(job, "is not empty", fork, job, "before tuning", job + "/../job/../full")
    assert_refused(job, "lies in the checkpoint that is forked", fork, job, "before tuning", job)
    assert_refused(job, "lies in the checkpoint that is forked", fork, job, "before tuning", job + "/new")
    assert (tmp_path / "full" / "notes.txt").read_text() == "mine"
    (tmp_path / "empty").mkdir()
    fork(job, "before tuning", str(tmp_path / "empty"))
    assert_refused(str(tmp_path / "empty"), "is not empty", fork, job, "before tuning", str(tmp_path / "empty"))


def test_a_savepoint_that_lost_a_file_is_refused(job, tmp_path):
    [saved] = savepoints(job)
    Path(job, "state", sorted(saved.state_files())[0]).unlink()
    for do, arguments in ((rewind, (job, "before tuning")), (fork, (job, "before tuning", str(tmp_path / "new")))):
        assert_refused(job, "is not whole", do, *arguments)


def test_a_savepoint_whose_epochs_were_taken_back_can_be_forked_but_not_returned_to(job, tmp_path):
    take_savepoint(job, "later")
    rewind(job, "before tuning")
    assert [(each.name, each.is_abandoned) for each in savepoints(job)] == [("before tuning", False), ("later", True)]
    live(Path(job), 8)
    assert_refused(job, "so it cannot come back. A fork can begin there", rewind, job, "later")
    assert fork(job, "later", str(tmp_path / "new")).epoch == 6


def test_a_damaged_savepoint_is_reported_and_nothing_is_swept_meanwhile(job, tmp_path):
    [path] = Path(job, "savepoints").iterdir()
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    assert_refused(job, "is damaged: its checksum does not match", savepoints, job)
    live(Path(job), 3)
    path.write_bytes(whole)
    [saved] = savepoints(job)
    assert not Checkpoint.of_any_flow(job).lacks(saved.manifest, saved.digests())


def test_a_job_whose_windows_were_closed_has_no_savepoint(tmp_path):
    flow = Flow("ends")
    flow.source("in", ListSource([[{"n": 1}]], "n int")).sink("out", MemorySink())
    run_local(flow, checkpoint=str(tmp_path / "job"), close_windows=True)
    assert_refused(str(tmp_path / "job"), "has closed all windows", take_savepoint, str(tmp_path / "job"), "x")
    rewind(str(tmp_path / "job"), 0)
    assert take_savepoint(str(tmp_path / "job"), "x").epoch == 0


# ── commands, and over HTTP ───────────────────────────────────────────────────────────────────────────────────────


def call(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, list(arguments))
    return result.exit_code, result.output


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("MIDSTREAM_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("COLUMNS", "200")


def test_savepoints_of_a_served_job(job, tmp_path, home):
    stand_in = StandInJob(tmp_path / "stand")
    stand_in.checkpoint = job
    with served(stand_in) as server:
        client = JobClient(server.url, server.token)
        assert client.savepoint("after ä?b", note="why", by="ann").epoch == 6
        assert [(each.name, each.epoch, each.note) for each in client.savepoints()] == [
            ("before tuning", 2, None),
            ("after ä?b", 6, "why"),
        ]
        with pytest.raises(CheckpointError, match="there is a savepoint 'before tuning' already"):
            client.savepoint("before tuning")
        with pytest.raises(CheckpointError, match="there is no savepoint 'nothing'"):
            client.delete_savepoint("nothing")
        assert client.delete_savepoint("after ä?b").by == "ann"
        assert call("savepoint", "fraud", "by command", "--note", "n") == (
            0,
            "savepoint 'by command' is epoch 6, revision 1\n",
        )
        code, listed = call("savepoints", "fraud")
        assert (code, [line.split("  ")[0] for line in listed.splitlines()]) == (
            0,
            ["name", "before tuning", "by command"],
        )
        assert call("savepoints", "fraud", "--delete", "by command") == (
            0,
            "savepoint 'by command' (epoch 6) is deleted\n",
        )
    assert [each.name for each in savepoints(job)] == ["before tuning"]


def test_commands_on_a_checkpoint(job, tmp_path, home):
    assert call("savepoint", job, "now") == (0, "savepoint 'now' is epoch 6, revision 1\n")
    code, said = call("fork", f"{job}@before tuning", str(tmp_path / "new"))
    assert code == 0
    assert "goes on after epoch 2" in said
    assert call("rewind", job, "before tuning") == (
        0,
        "the next start of the job goes on after epoch 2 (savepoint 'before tuning')\n",
    )
    assert call("rewind", job, "1") == (0, "the next start of the job goes on after epoch 1\n")
    assert "abandoned by a rewind" in call("savepoints", job)[1]
    assert call("savepoints", job, "--delete", "now") == (0, "savepoint 'now' (epoch 6) is deleted\n")
    assert call("savepoints", str(tmp_path / "new")) == (0, "The job has no savepoints.\n")
    for arguments, why in (
        (("fork", job, str(tmp_path / "other")), "is not CHECKPOINT@NAME"),
        (("fork", f"{job}@none", str(tmp_path / "other")), "there is no savepoint 'none'"),
        (("rewind", job, "8"), "epoch 8"),
        (("savepoint", job, "7"), "could be the number of an epoch"),
    ):
        code, said = call(*arguments)
        assert code == 1
        assert why in said


# ── Spark's own log ───────────────────────────────────────────────────────────────────────────────────────────────


def log_of(folder: Path, offsets: range, commits: range) -> SparkFiles:
    for log, epochs in (("offsets", offsets), ("commits", commits)):
        (folder / log).mkdir(parents=True)
        for epoch in epochs:
            (folder / log / str(epoch)).write_text(f"v1\n{{}}\n{log} {epoch}")
            (folder / log / f".{epoch}.crc").write_text("sum")
    (folder / "metadata").write_text("the query's number")
    (folder / "sources" / "0").mkdir(parents=True)
    (folder / "sources" / "0" / "0").write_text("first offsets")
    return SparkFiles(str(folder))


def test_the_files_that_spark_needs_to_continue_are_found_without_the_number_of_its_query(tmp_path):
    log = log_of(tmp_path / "spark", range(8), range(7))
    assert sorted(log.needed_after(Epoch(7))) == ["commits/6", "offsets/6", "offsets/7", "sources/0/0"]
    assert sorted(log.needed_after(Epoch(0))) == ["commits/0", "offsets/0", "sources/0/0"]
    with pytest.raises(CheckpointError, match="lacks offsets/8"):
        log.needed_after(Epoch(8))
    assert log.leads_after(Epoch(7))
    assert not log.leads_after(Epoch(8))


def test_the_log_is_cut_and_written_with_the_sums_of_hadoop_in_mind(tmp_path):
    log = log_of(tmp_path / "spark", range(3, 8), range(3, 7))
    log.remove_after(Epoch(5))
    log.write({"offsets/2": b"v1\n{}\nof the savepoint", "offsets/5": b"v1\n{}\nanother"})
    found = sorted(str(path.relative_to(tmp_path / "spark")) for path in (tmp_path / "spark").rglob("*[0-9]*"))
    assert [name for name in found if name.startswith("offsets")] == [
        "offsets/.3.crc",
        "offsets/.4.crc",
        "offsets/2",
        "offsets/3",
        "offsets/4",
        "offsets/5",
    ]
    assert [name for name in found if name.startswith("commits/") and "crc" not in name] == [
        "commits/3",
        "commits/4",
        "commits/5",
    ]


def test_without_a_query_there_is_no_log(tmp_path):
    log = SparkFiles(str(tmp_path / "none"))
    assert log.needed_after(Epoch(3)) == {}
    assert log.leads_after(Epoch(3))
