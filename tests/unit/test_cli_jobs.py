"""The commands for served jobs: which job is meant, what is sent to it, what is printed, how they exit."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path
from textwrap import dedent

import pyarrow as pa
import pytest
from typer.testing import CliRunner

import midstream
from midstream import Update
from midstream.checkpoint.change_log import ChangeLog
from midstream.checkpoint.change_records import Outcome, whoami
from midstream.checkpoint.manifest import Identity
from midstream.cli.app import app
from midstream.errors import JobFailed
from midstream.metrics import EpochProgress, JobMetrics, OperatorStats, Phase, SweepStats
from midstream.server.client import JobClient
from midstream.server.registry import ServedEntry, register
from midstream.storage.documents import write_struct
from tests.served import StandInJob, served

FIRST = "0123456789abcdef0123456789abcdef"
SECOND = "0127aaaaaaaaaaaaaaaaaaaaaaaaaaaa"

MODULE = """
    import pyarrow as pa

    FACTOR = 3


    def triple(row):
        return {**row, "n": FACTOR * row["n"]}


    class Model:
        def __init__(self, weight=5):
            self.weight = weight

        def __call__(self, row):
            return {**row, "n": self.weight * row["n"]}


    model = Model(7)
    rates = pa.table({"k": ["z"], "rate": [9.0]})


    def make():
        return Model(11)


    def broken():
        raise RuntimeError("no weights")


    def back(key, state):
        pass
"""


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """An empty current directory and registry; what commands do to the import system is undone."""
    monkeypatch.setenv("MIDSTREAM_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "new.py").write_text(dedent(MODULE), encoding="utf-8")
    yield tmp_path
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None)).startswith(str(tmp_path)):
            del sys.modules[name]


@pytest.fixture
def job(tmp_path):
    """A served job."""
    job = StandInJob(tmp_path / "job", id=FIRST)
    with served(job, checkpoint="somewhere"):
        yield job


@pytest.fixture
def two(tmp_path, job):
    """Another one beside it, whose id begins alike."""
    other = StandInJob(tmp_path / "other", name="clicks", id=SECOND)
    with served(other):
        yield job, other


def call(*arguments: str):
    return CliRunner().invoke(app, list(arguments))


def call_with_outcome(job, outcome, *arguments: str):
    """Call a command that waits; once the job has the request, let it end so."""

    def end():
        assert job.requested.wait(60)
        job.commit() if outcome is Outcome.APPLIED else job.fail("ValueError: broken\nrow: {'n': 1}")

    job.requested.clear()
    ending = threading.Thread(target=end)
    ending.start()
    result = call(*arguments)
    ending.join(60)
    return result


def runs(job, n=2):
    """The result of the job's current FM for a number."""
    return job.payload("FM")({"n": n, "k": "a"})["n"]


# ── jobs, status ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_jobs_says_how_to_serve_a_job_when_there_is_none():
    result = call("jobs")
    assert result.exit_code == 0
    assert "flow.start(…, serve=True)" in result.stdout


def test_jobs_lists_what_is_served_without_tokens(two):
    result = call("jobs")
    lines = [line.split() for line in result.stdout.splitlines()]
    assert lines[0] == ["name", "id", "pid", "revision", "status", "url"]
    assert [(line[0], line[1], *line[3:5]) for line in lines[1:]] == [
        ("fraud", FIRST[:8], "1", "running"),
        ("clicks", SECOND[:8], "1", "running"),
    ]
    assert all(line[5].startswith("http://127.0.0.1:") for line in lines[1:])
    assert "token" not in result.output


def test_jobs_shows_one_that_does_not_answer(job, monkeypatch):
    monkeypatch.setattr(JobClient, "_send", lambda *args: b"gibberish")
    assert "no answer" in call("jobs").stdout


def test_status_shows_epochs_and_the_change_on_trial(job):
    job.commit()
    job.update(Update("FM", lambda row: row))
    result = call("status", "fraud")
    assert result.exit_code == 0, result.output
    assert "fraud  running  revision 2" in result.stdout
    assert "checkpoint somewhere" in result.stdout
    assert "1 epochs  1,000 rows in  900 out since this start" in result.stdout
    assert "on trial: revision 2 (FM): pending" in result.stdout
    assert result.stdout.splitlines()[-1].split() == ["0", "1", "1,000", "900", "0", "500", "2,000"]


def commit_with_phases(job, *epochs):
    phases = (Phase("idle", -20, 0), Phase("plan", 0, 12), Phase("stage 0", 12, 40), Phase("commit", 40, 1050))
    job.progress = tuple(EpochProgress(epoch, 1, 0.0, 1050.0, (), 1000, 900, phases) for epoch in epochs)


def test_status_shows_where_the_time_of_the_last_epoch_went(job):
    assert "last epoch" not in call("status", "fraud").stdout
    commit_with_phases(job, 6, 7)
    assert "last epoch, ms: idle 20, plan 12, stage 0 28, commit 1,010" in call("status", "fraud").stdout


def test_epoch_draws_the_last_epoch_or_another_one(job, tmp_path):
    commit_with_phases(job, 6, 7)
    shown = call("epoch", "fraud").stdout.splitlines()
    assert shown[0].startswith("epoch 7 · revision 1 · 1,000 rows · 1050 ms")
    assert [line.split()[0] for line in shown[1:]] == ["idle", "plan", "stage", "commit"]
    assert call("epoch", "fraud", "--epoch", "6").stdout.startswith("epoch 6 ")
    assert call("epoch", "fraud", "--out", "e.svg").stdout == ""
    assert (tmp_path / "e.svg").read_text(encoding="utf-8").startswith("<svg ")


def test_epoch_refuses_what_it_cannot_draw(job, tmp_path):
    result = call("epoch", "fraud")
    assert (result.exit_code, result.stderr) == (
        1,
        "Error: job 'fraud' has committed no epoch since its start; wait for one\n",
    )
    commit_with_phases(job, 6, 7)
    result = call("epoch", "fraud", "--epoch", "3")
    assert result.exit_code == 1
    assert "job 'fraud' no longer knows epoch 3, or not yet; it has 6, 7" in result.stderr
    result = call("epoch", "fraud", "--out", "e.png")
    assert result.exit_code == 2
    assert "must end with .svg" in result.stderr
    assert not (tmp_path / "e.png").exists()
    result = call("epoch", "fraud", "--out", "missing/e.svg")
    assert (result.exit_code, result.stderr) == (1, "Error: cannot write 'missing/e.svg': No such file or directory.\n")
    assert call("epoch", "nobody").exit_code == 2


def test_status_says_when_the_checkpoint_cannot_be_swept(job):
    assert "sweeping" not in call("status", "fraud").stdout
    job.metrics = JobMetrics(sweep=SweepStats(removed=5, failed=1234, overdue=3, error="cannot remove 'x'"))
    assert (
        "sweeping the checkpoint failed 1,234 times, 3 files are still to be removed: cannot remove 'x'"
        in call("status", "fraud").stdout
    )


def test_status_counts_bad_rows_and_rows_from_the_future(job):
    stats = (OperatorStats("in", rows_ahead=7), OperatorStats("FM", rows_in=10, rows_out=8, errors=2))
    progress = EpochProgress(0, job.revision, 0.0, 500.0, stats, rows_in=1000, rows_out=900)
    job.progress, job.metrics = (progress,), job.metrics.after(progress).after(progress)
    lines = call("status", "fraud").stdout.splitlines()
    assert "errors: FM 4" in lines
    assert "rows ahead of time: in 14" in lines
    assert lines[-1].split()[4] == "2"


def test_status_of_a_failed_job_says_why(job):
    job.status, job.exception = "failed", JobFailed("epoch 3 [red] failed")
    assert "failed: epoch 3 [red] failed" in call("status", "fraud").stdout


# ── which job ─────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", ["clicks", SECOND, "0127"])
def test_a_job_is_named_by_name_or_by_the_beginning_of_its_id(two, name):
    assert "clicks" in call("status", name).stdout


@pytest.mark.parametrize("command", [["status"], ["explain"], ["update"], ["history"], ["revert"]])
def test_an_unknown_job_is_refused_with_a_list_of_served_jobs(two, command):
    more = {"explain": ["FM", "models/new.py:triple"], "update": ["FM", "models/new.py:triple"], "revert": ["1"]}
    result = call(*command, "frauds", *more.get(command[0], []))
    assert result.exit_code == 2
    assert (
        result.stderr == "Error: there is no job 'frauds'. The served jobs are fraud (01234567), clicks (0127aaaa).\n"
    )


def test_an_unknown_job_is_refused_when_none_is_served():
    result = call("status", "fraud")
    assert result.exit_code == 2
    assert "there is no job 'fraud'. No job is served on this machine" in result.stderr


def test_an_ambiguous_beginning_of_an_id_is_refused(two):
    result = call("status", "012")
    assert result.exit_code == 2
    assert "'012' may be fraud (01234567), clicks (0127aaaa); use the beginning" in result.stderr


def test_a_job_that_has_just_ended_is_reported():
    register(ServedEntry(os.getpid(), socket.gethostname(), "http://127.0.0.1:1", "token", FIRST, "fraud", "c", 0.0))
    result = call("status", "fraud")
    assert result.exit_code == 1
    assert "nobody answers at http://127.0.0.1:1" in result.stderr
    assert len(result.stderr.splitlines()) <= 2


# ── update ────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("function", "gives"),
    [
        ("models/new.py:triple", 6),
        ("./models/new.py:triple", 6),
        ("models.new:triple", 6),
        ("models/new.py:model", 14),
        ("models/new.py:make()", 22),
        ("models/new.py:Model()", 10),
    ],
)
def test_update_sends_a_function_by_value(job, function, gives):
    result = call("update", "fraud", "FM", function, "--no-wait")
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("revision 2 (FM): pending")
    for name in [name for name in sys.modules if name.startswith(("models", "new"))]:
        del sys.modules[name]  # the job needs none of it
    assert runs(job) == gives


SCRIPT = """
    import pyarrow as pa
    from midstream import Flow, ListSource, NoopSink

    flow = Flow("NAME")
    stream = flow.source("in", ListSource([[{"n": 1, "k": "a"}]], "n bigint, k string"))
    rates = pa.table({"k": ["a"], "rate": [1.0]})
    tail = stream.map("FM", lambda row: row).map("tail", lambda row: row)
    tail.lookup("rates", rates, on="k").sink("out", NoopSink())
"""


def test_deploy_plans_and_changes_a_served_job(job, here):
    (here / "script.py").write_text(dedent(SCRIPT.replace("NAME", "fraud")), encoding="utf-8")
    planned = call("deploy", "fraud", "script.py:flow", "--plan", "--svg", "plan.svg")
    assert planned.exit_code == 0, planned.output
    assert "adds map 'tail' behind FM" in planned.stdout
    assert (here / "plan.svg").read_text(encoding="utf-8").startswith("<svg")
    assert job.revision == 1
    done = call_with_outcome(job, Outcome.APPLIED, "deploy", "fraud", "script.py:flow", "--note", "of May")
    assert done.exit_code == 0, done.output
    assert "+tail" in done.stdout
    assert [op.name for op in job.graph] == ["in", "FM", "tail", "rates", "out"]
    assert job.history()[0].note == "of May"
    again = call("deploy", "fraud", "script.py:flow")
    assert again.exit_code == 0
    assert "nothing to change" in again.stdout


def test_deploy_that_is_rolled_back_or_refused_exits_with_1(job, here):
    (here / "script.py").write_text(dedent(SCRIPT.replace("NAME", "fraud")), encoding="utf-8")
    failed = call_with_outcome(job, Outcome.ROLLED_BACK, "deploy", "fraud", "script.py:flow")
    assert failed.exit_code == 1
    (here / "other.py").write_text(dedent(SCRIPT.replace("NAME", "bank")), encoding="utf-8")
    refused = call("deploy", "fraud", "other.py:flow")
    assert refused.exit_code == 1
    assert "the script is of flow 'bank', and the job runs flow 'fraud'" in refused.stderr


def test_update_waits_and_prints_outcome_and_delay(job):
    result = call_with_outcome(job, Outcome.APPLIED, "update", "fraud", "FM", "models/new.py:triple")
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("revision 2 (FM): applied, in effect after ")
    assert result.stdout.rstrip().endswith(" ms")


def test_update_that_is_rolled_back_exits_with_1(job):
    result = call_with_outcome(job, Outcome.ROLLED_BACK, "update", "fraud", "FM", "models/new.py:triple")
    assert result.exit_code == 1
    assert "revision 2 (FM): rolled back" in result.stdout
    assert "ValueError: broken" in result.stdout
    assert runs(job) == 2


def test_update_that_the_job_refuses_exits_with_1(job):
    result = call("update", "fraud", "nobody", "models/new.py:triple")
    assert result.exit_code == 1
    assert "Error: flow 'fraud' has no operator 'nobody'" in result.stderr
    assert [record.outcome for record in job.history()] == [Outcome.REFUSED]


def test_update_of_several_operators_with_options(job):
    result = call(
        *("update", "fraud", "FM", "models/new.py:triple", "rates", "models/new.py:rates", "--scheduler", "epoch"),
        *("--note", "why not", "--time-limit", "5 seconds", "--returns", "FM=n bigint, k string", "--no-wait"),
    )
    assert result.exit_code == 0, result.output
    [record] = job.history()
    assert (record.operators, record.scheduler, record.note) == (("FM", "rates"), "epoch", "why not")
    assert job.limits == [5.0]
    assert job.payload("rates").equals(pa.table({"k": ["z"], "rate": [9.0]}))


def test_tune_shows_knobs_and_sets_them(job):
    result = call_with_outcome(job, Outcome.APPLIED, "tune", "fraud", "pace=500 ms", "frame=2 MiB", "--note", "calm")
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("revision 2 (knobs pace, frame): applied")
    shown = {line.split("  ")[0]: line.split() for line in call("tune", "fraud").stdout.splitlines()}
    assert shown["pace"][1:3] == ["500", "ms"]
    assert shown["frame"][1:3] == ["2", "MiB"]
    assert job.history()[0].note == "calm"
    again = call_with_outcome(job, Outcome.ROLLED_BACK, "tune", "fraud", "pace=default")
    assert again.exit_code == 1
    assert job.knobs["pace"] == 500_000


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("paec=1 s", "there is no knob 'paec'; did you mean 'pace'? Knobs: pace, rows_per_epoch, slice"),
        ("pace", "'pace' is not KNOB=VALUE"),
        ("pace=2 hours", "out of range; give a length of time from 0 ms to 3600 s"),
        ("rows_per_epoch=10", "knob rows_per_epoch is for a GeneratorSource, and 'in' is none"),
    ],
)
def test_tune_refuses_unknown_knobs_and_invalid_values(job, text, says):
    result = call("tune", "fraud", text)
    assert result.exit_code == 1
    assert says in result.stderr
    assert job.knobs["pace"] == 0


def test_a_file_is_loaded_fresh_for_every_change(job, here, monkeypatch):
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    file = here / "models" / "new.py"
    for factor in (3, 4, 5):
        file.write_text(file.read_text().replace(f"FACTOR = {factor - 1}", f"FACTOR = {factor}"))
        os.utime(file, (1e9, 1e9))  # saved twice within a second, and as long as before: so caches see no difference
        assert call("update", "fraud", "FM", "models/new.py:triple", "--no-wait").exit_code == 0
        job.commit()
        assert runs(job) == 2 * factor


def test_an_installed_module_is_sent_by_value_too(job, here, monkeypatch):
    packages = here / "site-packages"
    packages.mkdir()
    (packages / "installed_models.py").write_text(dedent(MODULE), encoding="utf-8")
    monkeypatch.syspath_prepend(str(packages))
    assert call("update", "fraud", "FM", "installed_models:triple", "--no-wait").exit_code == 0
    assert job.payload("FM") is not sys.modules["installed_models"].triple, "the job's own may be an older one"
    assert runs(job) == 6


def test_ctrl_c_stops_waiting_but_not_the_change(job, monkeypatch):
    def interrupted(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(JobClient, "wait", interrupted)
    result = call("update", "fraud", "FM", "models/new.py:triple")
    assert result.exit_code == 1
    assert "no longer waiting for revision 2 (FM); 'midstream history fraud' shows the outcome" in result.stderr
    assert job.on_trial is not None


def test_update_reports_that_the_job_ended_before_the_outcome(job, monkeypatch):
    monkeypatch.setattr(job.changes, "request", _ended_at_once(job.changes))
    result = call("update", "fraud", "FM", "models/new.py:triple")
    assert result.exit_code == 1
    assert "revision 2 (FM): pending" in result.stdout
    assert "job 'fraud' has ended" in result.stdout


def _ended_at_once(changes):
    request = changes.request

    def then_end(*args):
        change = request(*args)
        changes.abandon("job 'fraud' has ended")
        return change

    return then_end


WRONG = [
    (["FM"], "'FM' has no partner: write operators and functions in pairs"),
    (["FM", "models/new.py:triple", "rates"], "'rates' has no partner"),
    (["FM", "triple"], "'triple' does not name a function. Write MODULE:FUNCTION"),
    (["FM", "models/new.py:"], "does not name a function"),
    (["FM", "models/old.py:triple"], "there is no file 'models/old.py'"),
    (["FM", "models.old:triple"], "there is no module 'models.old'"),
    (["FM", "models/new:triple"], "a path must end in .py"),
    (["FM", "models/new.py:tripple"], "models/new.py has no 'tripple'. Did you mean 'triple'?"),
    (["FM", "models/new.py:xyz"], "models/new.py has no 'xyz'. It has triple, Model, "),
    (["FM", "models/new.py:FACTOR()"], "models/new.py:FACTOR is a int and cannot be called; leave out the ()"),
    (["FM", "models/new.py:triple", "--returns", "FM"], "--returns 'FM' is not OPERATOR=DDL"),
    (["FM", "models/new.py:triple", "--migrate", "=x"], "--migrate '=x' is not OPERATOR=MODULE:FUNCTION"),
    (["FM", "models/new.py:triple", "--migrate", "B=models/new.py:back"], "--migrate names B; the operators of this"),
    (["FM", "models/new.py:triple", "--returns", "B=n int"], "--returns names B; the operators of this"),
]


@pytest.mark.parametrize(("arguments", "says"), WRONG, ids=[" ".join(arguments) for arguments, _ in WRONG])
def test_a_wrong_command_line_gets_a_short_message_and_exit_code_2(job, arguments, says):
    for command in ("update", "explain"):
        result = call(command, "fraud", *arguments)
        assert result.exit_code == 2, result.output
        assert says in result.stderr
        assert len(result.stderr.splitlines()) <= 2
    assert job.history() == []


def test_an_unknown_scheduler_is_refused_with_a_list_of_known_ones(job):
    result = call("update", "fraud", "FM", "models/new.py:triple", "--scheduler", "luck")
    assert result.exit_code == 2
    assert "fries-unpruned" in result.stderr


def test_a_module_that_fails_shows_the_users_own_traceback(job, here):
    (here / "models" / "bad.py").write_text("import no_such_thing\n")
    for function, says in (
        ("models/bad.py:f", "No module named 'no_such_thing'"),
        ("models/new.py:broken()", "no weights"),
    ):
        result = call("update", "fraud", "FM", function)
        assert result.exit_code == 1
        assert result.stderr.startswith("Traceback")
        assert says in result.stderr
        assert "midstream/cli" not in result.stderr


# ── explain, history, revert ──────────────────────────────────────────────────────────────────────────────────────


def test_explain_prints_the_plan_and_draws_it(job, here):
    result = call("explain", "fraud", "FM", "models/new.py:triple", "--svg", "plan.svg", "--scheduler", "epoch")
    assert result.exit_code == 0, result.output
    assert "expected wait: up to 250 ms" in result.stdout
    assert "<svg" in (here / "plan.svg").read_text()
    assert job.history() == []
    unwritable = call("explain", "fraud", "FM", "models/new.py:triple", "--svg", "no/such/plan.svg")
    assert unwritable.exit_code == 1
    assert "cannot write 'no/such/plan.svg'" in unwritable.stderr


def test_history_of_a_running_job(job):
    assert call("history", "fraud").stdout == "The job has not been changed.\n"
    job.update(Update("FM", lambda row: row), by="ann@host", note="a [bold] move")
    job.fail("ValueError: broken\nand more")
    result = call("history", "fraud")
    assert result.exit_code == 0, result.output
    head, what, note, error = result.stdout.splitlines()
    assert head.startswith("revision 2  rolled back  20")
    assert what.startswith("    FM: a lambda, by ann@host (fries, in effect after ")
    assert (note, error) == ("    note: a [bold] move", "    ValueError: broken")
    [record] = json.loads(call("history", "fraud", "--json").stdout)
    assert (record["by"], record["outcome"], record["edits"][0]["operator"]) == ("ann@host", "rolled back", "FM")


def test_history_shows_what_was_refused(job):
    call("update", "fraud", "nobody", "models/new.py:triple")
    head, what, error = call("history", "fraud").stdout.splitlines()
    assert head.startswith("at revision 1  refused  20")
    assert what == f"    nobody, by {whoami()} (fries)"
    assert error.startswith("    flow 'fraud' has no operator 'nobody'")


@pytest.mark.parametrize("width", [80, 200])
def test_history_fits_the_terminal_without_breaking_words(job, monkeypatch, width):
    monkeypatch.setenv("COLUMNS", str(width))
    note = (
        "the model of May, trained on all payments of the last two years, and on the disputed ones of this year twice"
    )
    job.update(Update("FM", lambda row: row), Update("rates", pa.table({"k": ["a"], "rate": [2.0]})), by="ann@host")
    job.commit()
    job.update(Update("FM", lambda row: row), by="a-robot-with-a-long-name@build-server-17.internal", note=note)
    job.fail(
        "ValueError: this model was never trained on payments above 500, and there was one of 1,200 in epoch 1,234"
    )
    call("update", "fraud", "nobody", "models/new.py:triple")
    lines = call("history", "fraud").stdout.splitlines()
    assert max(map(len, lines)) <= width
    assert [line.split("  ")[:2] for line in lines if not line.startswith("    ")] == [
        ["revision 2", "applied"],
        ["revision 3", "rolled back"],
        ["at revision 4", "refused"],
    ]
    text = " ".join(" ".join(lines).split())  # as if it had not been wrapped
    assert f"note: {note} ValueError: this model was never trained on payments above 500, and there was one" in text
    assert "by a-robot-with-a-long-name@build-server-17.internal (fries" in text
    assert (len(lines) == 9) == (width == 200), "a wide terminal needs no wrapping"


def test_history_of_a_job_that_is_not_running_is_read_from_its_checkpoint(here, job):
    folder = here / "checkpoint"
    job.update(Update("FM", lambda row: row), by="ann@host")
    for record in job.history():
        ChangeLog(str(folder / "changes")).keep(record)
    (folder / "midstream.json").write_bytes(write_struct(Identity("0.1.0", "j", "fraud", ("in",))))
    for named in ("checkpoint", "./checkpoint", str(folder)):
        result = call("history", named)
        assert result.exit_code == 0, result.output
        assert "ann@host" in result.stdout


def test_history_of_a_folder_that_is_not_a_checkpoint(here):
    result = call("history", "models")
    assert result.exit_code == 1
    assert "'models' is not the checkpoint of a job" in result.stderr
    assert call("history", "nothing").exit_code == 2


def test_revert_goes_back_and_waits(job):
    call("update", "fraud", "FM", "models/new.py:triple", "--no-wait")
    job.commit()
    result = call_with_outcome(job, Outcome.APPLIED, "revert", "fraud", "1")
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("revision 3 (FM): applied")
    assert runs(job) == 2


def test_revert_reports_what_it_cannot_do(job):
    result = call("revert", "fraud", "7")
    assert result.exit_code == 1
    assert "Error: there is no revision 7 to go back to" in result.stderr
    call("update", "fraud", "FM", "models/new.py:triple", "--no-wait")
    job.commit()
    result = call("revert", "fraud", "1", "--migrate", "rates=models/new.py:back")
    assert result.exit_code == 1
    assert "migrate= names rates" in result.stderr
    assert call("revert", "fraud", "one").exit_code == 2
    assert call("revert", "fraud", "1", "--migrate", "rates").exit_code == 2


# ── for real ──────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.long
def test_a_command_in_another_process_changes_the_job(job, here):
    """What the other commands of this file do within this process, where nothing needs to travel."""
    source = str(Path(midstream.__file__).parents[1])
    command = [sys.executable, "-m", "midstream", "update", FIRST[:6], "FM", "models/new.py:make()", "--no-wait"]
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": source}, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "revision 2 (FM): pending\n"), done.stderr
    assert runs(job) == 22
    assert job.history()[0].updates[0].label == "Model"
