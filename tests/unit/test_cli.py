"""The command line: what it prints, what it refuses, how it exits; and the display of a running job."""

from __future__ import annotations

import io
import os
import sys
from dataclasses import dataclass, field
from textwrap import dedent

import pytest
from rich.console import Console
from typer.testing import CliRunner

from midstream.cli import app as app_module
from midstream.cli.app import app
from midstream.cli.live import print_summary, watch
from midstream.errors import JobFailed, SetupError
from midstream.flow.model import Graph
from midstream.flow.sinks import MemorySink
from midstream.flow.sources import ListSource
from midstream.metrics import EpochProgress, Histogram, JobMetrics, OperatorStats
from midstream.operators.builder import Flow
from midstream.runtime.spark import doctor
from midstream.runtime.spark.doctor import Finding
from midstream.version import __version__

MODULE = """
    from midstream.operators.builder import Flow
    from midstream.flow.sinks import MemorySink
    from midstream.flow.sources import ListSource


    def build(name="greetings"):
        flow = Flow(name)
        names = flow.source("names", ListSource.of([{"name": "Ada"}], schema="name string", epoch_rows=1))
        names.key_by("by_name", "name").map("hello", lambda row: row).sink("out", MemorySink())
        return flow


    flow = build()
    number = 42
    unfinished = Flow("unfinished")


    def with_session(spark):
        return build(spark.name)


    def two(spark, more):
        return build()


    def forgetful():
        build()


    def broken():
        raise RuntimeError("the cat sat on the keyboard")


    def misbuilt():
        build().source("names", "not a stream")
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty current directory; what commands do to the import system is undone."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None)).startswith(str(tmp_path)):
            del sys.modules[name]


@pytest.fixture
def greetings(here):
    (here / "greetings.py").write_text(dedent(MODULE), encoding="utf-8")
    return here


def call(*arguments: str):
    return CliRunner().invoke(app, list(arguments))


def test_version():
    result = call("--version")
    assert (result.exit_code, result.stdout) == (0, f"midstream {__version__}\n")


def test_without_a_command_the_commands_are_listed():
    result = call()
    assert result.exit_code == 2
    assert all(command in result.output for command in ("graph", "run", "doctor"))


# graph


TEXT = """\
greetings
▶  names    source
●  by_name  key_by
┊
●  hello    map
■  out      sink
"""


@pytest.mark.parametrize("target", ["greetings:flow", "greetings.py:flow", "./greetings.py:flow", "greetings:build"])
def test_graph_draws_a_flow_or_what_a_function_returns(greetings, target):
    result = call("graph", target)
    assert (result.exit_code, result.stdout) == (0, TEXT), result.stderr


def test_graph_finds_modules_in_packages_of_the_current_directory(here):
    (here / "pipelines").mkdir()
    (here / "pipelines" / "hello.py").write_text(dedent(MODULE), encoding="utf-8")
    assert call("graph", "pipelines.hello:flow").stdout == TEXT
    assert call("graph", os.path.join("pipelines", "hello.py") + ":flow").stdout == TEXT


def test_a_file_may_be_called_like_a_module_and_import_its_neighbours(here):
    (here / "sub").mkdir()
    (here / "sub" / "neighbour.py").write_text(dedent(MODULE), encoding="utf-8")
    (here / "sub" / "json.py").write_text("from neighbour import flow\n", encoding="utf-8")
    import json

    assert call("graph", "sub/json.py:flow").stdout == TEXT
    assert sys.modules["json"] is json


def test_graph_shows_stages(greetings):
    lines = call("graph", "greetings:flow", "--stages").stdout.splitlines()
    assert [line.split()[1:] for line in lines[1:] if "[" in line] == [
        ["names", "source", "[stage", "0]"],
        ["by_name", "key_by", "[stage", "0]"],
        ["hello", "map", "[stage", "1]"],
    ]


@pytest.mark.parametrize(("format", "start"), [("text", "greetings"), ("mermaid", "---\ntitle"), ("svg", "<svg ")])
def test_graph_writes_any_format_to_a_file(greetings, format, start):
    result = call("graph", "greetings:flow", "--format", format, "-o", "drawn")
    assert (result.exit_code, result.stdout) == (0, "")
    written = (greetings / "drawn").read_text(encoding="utf-8")
    assert written.startswith(start)
    assert written == call("graph", "greetings:flow", "--format", format).stdout


def test_graph_reports_an_output_file_that_it_cannot_write(greetings):
    result = call("graph", "greetings:flow", "-o", "no/such/folder.svg")
    assert result.exit_code == 1
    assert "cannot write" in result.stderr


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("greetings", "'greetings' does not name a flow. Write MODULE:FLOW"),
        ("greetings:", "does not name a flow"),
        (":flow", "does not name a flow"),
        ("greetings:a.b", "does not name a flow"),
        ("no.such.module:flow", "there is no module 'no.such.module', neither in"),
        ("greetings.deeper:flow", "there is no module 'greetings.deeper'"),
        (".greetings:flow", "there is no module '.greetings'"),
        ("missing.py:flow", "there is no file 'missing.py' in"),
        ("folder/greetings:flow", "a path must end in .py"),
        ("greetings:flwo", "has no 'flwo'. Did you mean 'flow'? It has flow, unfinished, build(), with_session()"),
        ("greetings:number", "greetings:number is a int, not a Flow or a function that returns one. It has flow"),
        ("greetings:Flow", "greetings:Flow is a type, not a Flow"),
        ("greetings:two", "takes 2 parameters (spark, more)"),
        ("greetings:forgetful", "returned NoneType, not a Flow. Did you forget to return it?"),
    ],
)
@pytest.mark.parametrize("command", ["graph", "run"])
def test_a_wrong_target_is_a_usage_error_that_says_what_there_is(greetings, session, command, target, message):
    result = call(command, target)
    assert result.exit_code == 2, result.output
    assert message in result.stderr
    assert "Traceback" not in result.stderr


def test_a_module_without_candidates_says_so(here):
    (here / "bare.py").write_text("x = 1\n", encoding="utf-8")
    assert "It has no Flow, and no function that could make one." in call("graph", "bare:flow").stderr


def test_an_error_in_the_users_function_shows_the_users_frames_only(greetings):
    result = call("graph", "greetings:broken")
    assert result.exit_code == 1
    assert result.stderr.startswith("Traceback (most recent call last):\n")
    assert result.stderr.count("File ") == 1
    assert 'raise RuntimeError("the cat sat on the keyboard")' in result.stderr


def test_an_error_of_the_builder_points_at_the_users_line(greetings):
    result = call("graph", "greetings:misbuilt")
    assert result.exit_code == 1
    assert result.stderr.count("File ") == 1
    assert 'build().source("names", "not a stream")' in result.stderr


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("import not_installed_anywhere\n", "No module named 'not_installed_anywhere'"),
        ("flow = (\n", "SyntaxError: '(' was never closed"),
        ("raise SystemExit(3)\n", "SystemExit: 3"),
    ],
)
@pytest.mark.parametrize("target", ["bad:flow", "bad.py:flow"])
def test_an_error_while_the_users_module_is_imported_is_a_failure(here, text, message, target):
    (here / "bad.py").write_text(text, encoding="utf-8")
    result = call("graph", target)
    assert result.exit_code == 1
    assert message in result.stderr
    assert "importlib" not in result.stderr


def test_a_flow_that_is_not_valid_is_a_failure(greetings):
    result = call("graph", "greetings:unfinished")
    assert result.exit_code == 1
    assert "Error: flow 'unfinished'" in result.stderr


def test_an_unknown_format_is_a_usage_error(greetings):
    assert call("graph", "greetings:flow", "--format", "pdf").exit_code == 2


# doctor


GOOD = Finding("Java", True, "17 (JAVA_HOME)")
BAD = Finding("pandas", False, "3.0.0", "Install an older [pandas].")


def test_doctor_lists_all_findings_and_exits_with_0(monkeypatch):
    monkeypatch.setattr(doctor, "diagnose", lambda: [GOOD])
    result = call("doctor")
    assert result.exit_code == 0
    assert "17 (JAVA_HOME)" in result.stdout


def test_doctor_fails_when_something_is_missing_and_gives_the_advice(monkeypatch):
    monkeypatch.setattr(doctor, "diagnose", lambda: [GOOD, BAD])
    result = call("doctor")
    assert result.exit_code == 1
    assert "Install an older [pandas]." in result.stdout
    assert "17 (JAVA_HOME)" in result.stdout


@pytest.mark.parametrize(("findings", "code", "printed"), [([GOOD], 0, False), ([GOOD, BAD], 1, True)])
def test_quiet_doctor_prints_only_problems(monkeypatch, findings, code, printed):
    monkeypatch.setattr(doctor, "diagnose", lambda: findings)
    result = call("doctor", "--quiet")
    assert result.exit_code == code
    assert "Java" not in result.stdout
    assert ("pandas" in result.stdout) is printed


# run, and the display


def small_graph() -> Graph:
    flow = Flow("greetings")
    names = flow.source("names", ListSource.of([{"name": "Ada"}], schema="name string", epoch_rows=1))
    names.key_by("by_name", "name").map("hello", lambda row: row).sink("out", MemorySink())
    return flow.graph


def epoch_of(number: int) -> EpochProgress:
    hello = OperatorStats("hello", 1000, 900, 2, 250_000, 200_000, Histogram.of([(8.0, 99), (64.0, 1)]))
    names = OperatorStats("names", 0, 1000, 2, 0, 0)
    return EpochProgress(number, 1, 0.0, 500.0, (names, hello), 1000, 900)


@dataclass
class ScriptedJob:
    """Commits one epoch each time it is waited for; after the last one it ends, or fails."""

    last: int = 3
    failure: JobFailed | None = None
    interrupt_at: int | None = None
    graph: Graph = field(default_factory=small_graph)
    name: str = "greetings"
    status: str = "running"
    progress: tuple[EpochProgress, ...] = ()
    metrics: JobMetrics = JobMetrics()  # noqa: RUF009 - frozen
    started_with: dict[str, object] = field(default_factory=dict)
    stops: int = 0

    def await_epoch(self, count: int, timeout: float | None = None) -> bool:
        if len(self.progress) == self.interrupt_at:
            raise KeyboardInterrupt
        if len(self.progress) == self.last:
            self.status = "failed" if self.failure else "finished"
            if self.failure:
                raise self.failure
            return False
        self.progress += (epoch_of(len(self.progress)),)
        self.metrics = self.metrics.after(self.progress[-1])
        return True

    def await_termination(self, timeout: float | None = None) -> bool:
        if self.failure:
            raise self.failure
        return True

    def stop(self) -> None:
        self.stops += 1
        if self.status == "running":
            self.status = "stopped"


@dataclass
class Session:
    name: str = "session"
    master: str = ""
    conf: dict[str, str] = field(default_factory=dict)
    stops: int = 0

    def stop(self) -> None:
        self.stops += 1


@pytest.fixture
def session(monkeypatch):
    session = Session()

    def start(master, conf):
        session.master, session.conf = master, conf
        return session

    monkeypatch.setattr(app_module, "local_session", start)
    return session


@pytest.fixture
def job(monkeypatch):
    job = ScriptedJob()

    def start(flow, spark, **options):
        assert os.path.isdir(options["checkpoint"]) or options["checkpoint"] == "given"
        job.started_with = {"flow": flow.name, "spark": spark} | options
        return job

    monkeypatch.setattr(Flow, "start", start)
    return job


LINE = "revision 1  500 ms  1,000 rows in  900 out  2,000 rows/s  p50 8 ms  p99 8 ms"


def test_run_prints_a_line_per_epoch_and_a_summary_and_stops_everything(greetings, session, job):
    result = call("run", "greetings:flow", "--checkpoint", "given")
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines() == [
        f"epoch 0  {LINE}",
        f"epoch 1  {LINE}",
        f"epoch 2  {LINE}",
        "greetings finished  3 epochs  3,000 rows in  2,700 out  2,000 rows/s  p50 8 ms  p99 8 ms",
    ]
    assert (job.stops, session.stops) == (1, 1)
    assert (session.master, session.conf) == ("local[*]", {})


def test_run_passes_its_options_on(greetings, session, job):
    arguments = ["--checkpoint", "given", "--trigger", "2 s", "--master", "local[3]", "--conf", "a=b=c", "--conf", "d="]
    assert call("run", "greetings:flow", "--serve", *arguments).exit_code == 0
    options = {"checkpoint": "given", "trigger": "2 s", "serve": True}
    assert job.started_with == {"flow": "greetings", "spark": session} | options
    assert (session.master, session.conf) == ("local[3]", {"a": "b=c", "d": ""})


def test_run_gives_the_session_to_a_function_that_takes_one(greetings, session, job):
    assert call("run", "greetings:with_session").exit_code == 0
    assert job.started_with["flow"] == "session"


def test_graph_starts_a_session_only_for_a_function_that_takes_one(greetings, session):
    assert call("graph", "greetings:build").stdout.startswith("greetings")
    assert session.stops == 0
    assert call("graph", "greetings:with_session").stdout.startswith("session")
    assert session.stops == 1


def test_run_without_a_checkpoint_says_which_folder_it_uses_and_removes_it(greetings, session, job):
    result = call("run", "greetings:flow")
    folder = str(job.started_with["checkpoint"])
    assert f"No --checkpoint: using {folder}" in result.stderr
    assert not os.path.exists(folder)


def test_run_stops_after_the_given_number_of_epochs(greetings, session, job):
    job.last = 100
    result = call("run", "greetings:flow", "--epochs", "2")
    assert [line.split()[:2] for line in result.stdout.splitlines()] == [
        ["epoch", "0"],
        ["epoch", "1"],
        ["greetings", "stopped"],
    ]


def test_ctrl_c_stops_the_job_and_prints_the_summary(greetings, session, job):
    job.interrupt_at = 1
    result = call("run", "greetings:flow")
    assert result.exit_code == 0
    assert result.stdout.splitlines()[1:] == [
        "stopping",
        "greetings stopped  1 epoch  1,000 rows in  900 out  2,000 rows/s  p50 8 ms  p99 8 ms",
    ]
    assert (job.stops, session.stops) == (1, 1)


def test_run_prints_why_a_job_failed_without_midstreams_own_frames(greetings, session, job):
    job.failure = JobFailed("operator 'hello' failed on {'name': 'Ada'}")
    result = call("run", "greetings:flow")
    assert result.exit_code == 1
    assert result.stderr.splitlines()[-1] == "Error: operator 'hello' failed on {'name': 'Ada'}"
    assert "greetings failed" in result.stdout
    assert (job.stops, session.stops) == (1, 1)


def test_run_reports_missing_requirements(greetings, monkeypatch):
    def refuse(master, conf):
        raise SetupError("no java")

    monkeypatch.setattr(app_module, "local_session", refuse)
    result = call("run", "greetings:flow")
    assert (result.exit_code, result.stderr) == (1, "Error: no java\n")


@pytest.mark.parametrize("options", [["--conf", "novalue"], ["--conf", "=x"], ["--epochs", "0"], ["--for", "-1"]])
def test_run_refuses_invalid_options(greetings, session, options):
    assert call("run", "greetings:flow", *options).exit_code == 2


def screen(height: int = 40) -> Console:
    return Console(file=io.StringIO(), force_terminal=True, color_system=None, width=100, height=height)


def shown(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def last_screen(console: Console) -> list[str]:
    return shown(console).rpartition("greetings  ")[2].splitlines()


def test_a_terminal_shows_a_live_table_of_operators():
    console = screen()
    assert watch(ScriptedJob(), console=console) == 2
    assert "waiting for the first epoch" in shown(console)
    lines = last_screen(console)
    assert lines[0] == "finished  epoch 2  revision 1  500 ms  2,000 rows/s  p50 8 ms  p99 8 ms"
    table = [line.split() for line in lines[1:6]]
    assert table == [
        ["operator", "kind", "rows/s", "µs/row", "busy", "%", "p50", "ms", "p99", "ms"],
        ["names", "source", "2,000", "0.0", "0", "–", "–"],
        ["by_name", "key_by", "–", "–", "–", "–", "–"],
        ["hello", "map", "2,000", "250.0", "50", "8", "8"],
        ["out", "sink", "–", "–", "–", "–", "–"],
    ]
    assert "last 3 epochs" in lines[6]


def test_a_short_terminal_shows_the_busiest_operators_in_the_order_of_the_flow():
    console = screen(height=5)
    watch(ScriptedJob(), console=console)
    lines = last_screen(console)
    assert [line.split()[0] for line in lines[2:5]] == ["names", "by_name", "hello"]
    assert "busiest 3 of 4 operators" in "\n".join(lines)


def test_a_failed_job_stays_on_the_screen_and_its_failure_is_raised():
    console = screen()
    with pytest.raises(JobFailed, match="boom"):
        watch(ScriptedJob(failure=JobFailed("boom")), console=console)
    assert last_screen(console)[0].startswith("failed  epoch 2")


def test_a_job_that_failed_before_it_is_watched_raises_as_well():
    with pytest.raises(JobFailed, match="boom"):
        watch(ScriptedJob(failure=JobFailed("boom"), status="failed"), console=screen(), plain=True)


def test_watch_returns_after_its_time_limit_while_the_job_goes_on():
    ticks = iter(range(100))
    job = ScriptedJob(last=1000)
    assert watch(job, seconds=10, plain=True, console=screen(), clock=lambda: float(next(ticks))) < 10
    assert (job.status, job.stops) == ("running", 0)


def test_a_second_watch_continues_after_the_last_epoch_shown():
    job, first, second = ScriptedJob(last=9), screen(), screen()
    last = watch(job, epochs=2, plain=True, console=first)
    assert watch(job, epochs=4, plain=True, console=second, after=last) == 3
    assert [line.split()[1] for line in shown(second).splitlines()] == ["2", "3"]


def test_the_summary_omits_what_was_not_measured():
    console = screen()
    print_summary(ScriptedJob(metrics=JobMetrics(epochs=1, rows_in=10, busy_ms=1000.0)), console)
    assert shown(console) == "greetings running  1 epoch  10 rows in  0 out  10 rows/s\n"
