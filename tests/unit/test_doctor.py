"""Verdicts on any machine, whatever this one has; then a check of this one."""

from __future__ import annotations

import os
import socket
import stat
import subprocess
import sys
import tempfile
import types
from pathlib import Path

import pytest

from midstream.errors import SetupError
from midstream.runtime.spark.doctor import (
    JavaProbe,
    diagnose,
    java_version,
    judge_curve,
    judge_disk,
    judge_java,
    judge_memory,
    judge_package,
    judge_python,
    numbers_of,
    require_java,
    require_pyspark,
)
from midstream.runtime.spark.session import default_conf


@pytest.mark.parametrize(
    ("answer", "version"),
    [
        ('openjdk version "17.0.15" 2025-04-15\nOpenJDK Runtime Environment', 17),
        ('openjdk version "21" 2023-09-19', 21),
        ('java version "1.8.0_391"', 8),
        ('openjdk version "24-ea" 2025-03-18', 24),
        ('Picked up JAVA_TOOL_OPTIONS: -Xmx1g\nopenjdk version "11.0.2" 2019-01-15', 11),
        ('java version "10"', 10),
        ("Unable to locate a Java Runtime.", None),
        ("", None),
    ],
)
def test_java_versions_are_parsed_from_many_formats(answer, version):
    assert java_version(answer) == version


@pytest.mark.parametrize(
    ("version", "numbers"), [("4.3.0", (4, 3, 0)), ("4.2.0.dev1", (4, 2, 0)), ("5", (5,)), ("?", ())]
)
def test_versions_are_compared_by_their_numbers(version, numbers):
    assert numbers_of(version) == numbers


@pytest.mark.parametrize(("version", "ok"), [((3, 10, 14), False), ((3, 11, 0), True), ((3, 14, 1), True)])
def test_python_must_be_new_enough(version, ok):
    finding = judge_python(version)
    assert finding.ok is ok
    assert bool(finding.advice) is not ok


def test_a_good_java_is_named_with_its_place():
    finding = judge_java(JavaProbe(None, "/java/17", 'openjdk version "17.0.1"'))
    assert (finding.ok, finding.found, finding.advice) == (True, "17 (/java/17)", "")


@pytest.mark.parametrize(
    ("probe", "found"),
    [
        (JavaProbe(None, None), "no java on PATH, and no JAVA_HOME"),
        (JavaProbe("/jdk", None), "no bin/java in JAVA_HOME (/jdk)"),
        (JavaProbe(None, "/bin/java", 'java version "1.8.0_1"'), "8 (/bin/java)"),
        (JavaProbe(None, "/bin/java", "Unable to locate\na Java"), "/bin/java, which says: Unable to locate"),
        (JavaProbe(None, "/bin/java", ""), "/bin/java, which says: nothing"),
    ],
)
def test_a_missing_or_old_java_is_reported_with_how_to_install_one(probe, found):
    finding = judge_java(probe)
    assert not finding.ok
    assert finding.found == found
    for system in ("Debian", "Ubuntu", "Fedora", "macOS", "JAVA_HOME"):
        assert system in finding.advice


@pytest.mark.parametrize(
    ("version", "ok"), [("4.1.4", False), ("4.2.0", True), ("4.2", True), ("4.9", True), ("5.0.0", False), ("?", False)]
)
def test_a_package_must_be_in_its_range(version, ok):
    finding = judge_package("pyspark", version, (4, 2), (5,), "Install it.")
    assert finding.ok is ok
    assert finding.advice == ("" if ok else "midstream needs pyspark 4.2 or later, before 5. Install it.")


def test_a_package_without_an_upper_bound_may_be_of_any_later_version():
    assert judge_package("pyarrow", "99.0", (18,), None, "").ok
    assert (
        judge_package("pyarrow", "17.0", (18,), None, "Get it.").advice
        == "midstream needs pyarrow 18 or later. Get it."
    )


def test_the_machine_itself_is_judged():
    assert judge_disk(5.0).ok
    assert not judge_disk(0.5).ok
    assert judge_disk(None).found == "unknown"
    assert judge_memory(8.0).ok
    assert "2 GB" in judge_memory(0.9).advice
    assert judge_memory(None).ok
    assert judge_curve(True).ok
    assert "pyzmq" in judge_curve(False).advice


def test_require_pyspark_accepts_the_range_and_names_what_it_refuses():
    require_pyspark("4.2.1")
    with pytest.raises(
        SetupError, match=r"pyspark 3\.5\.1 cannot run a flow.*4\.2 or later, before 5.*pip install"
    ) as e:
        require_pyspark("3.5.1")
    assert e.value.version == "3.5.1"


def test_spark_4_1_is_refused_with_the_reason_before_it_is_used(tmp_path):
    """There, a run would end after its first epoch and be reported as finished."""
    code = """
import pyspark, sys
import pyspark.sql.streaming.datasource as datasource
pyspark.__version__ = "4.1.4"
del datasource.SupportsTriggerAvailableNow
from midstream import Flow, ListSource, MemorySink
flow = Flow("f")
flow.source("in", ListSource([[]], "n bigint")).sink("out", MemorySink())
flow.start(None, checkpoint=sys.argv[1])
"""
    checkpoint = tmp_path / "checkpoint"
    run = subprocess.run([sys.executable, "-c", code, str(checkpoint)], capture_output=True, text=True)
    assert "SetupError: pyspark 4.1.4 cannot run a flow. Spark 4.1 would end an available-now run" in run.stderr
    assert "midstream needs pyspark 4.2 or later" in run.stderr
    assert not checkpoint.exists()


def test_a_pyspark_that_lacks_what_midstream_imports_is_refused_with_the_reason(tmp_path):
    old = tmp_path / "old"
    (old / "pyspark").mkdir(parents=True)
    (old / "pyspark" / "__init__.py").write_text('__version__ = "3.5.9"\n')
    code = """
from midstream import Flow, ListSource, MemorySink, local_session
flow = Flow("f")
flow.source("in", ListSource([[]], "n bigint")).sink("out", MemorySink())
for start in (local_session, lambda: flow.start(None, checkpoint="never")):
    try:
        start()
    except Exception as error:
        print(type(error).__name__, error)
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(old), os.environ.get("PYTHONPATH", "")])}
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, cwd=tmp_path)
    found = [line.partition(", before")[0] for line in run.stdout.splitlines()]
    assert found == 2 * ["SetupError pyspark 3.5.9 cannot run a flow. midstream needs pyspark 4.2 or later"], run.stderr


@pytest.fixture
def no_jvm(monkeypatch):
    monkeypatch.delenv("PYSPARK_GATEWAY_PORT", raising=False)
    monkeypatch.setitem(sys.modules, "pyspark", types.ModuleType("pyspark"))
    return monkeypatch


def java_that_says(folder, text):
    script = folder / "bin" / "java"
    script.parent.mkdir()
    script.write_text(f"#!/bin/sh\necho '{text}' >&2\n")
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    return folder


@pytest.mark.skipif(os.name == "nt", reason="the stand-in for java is a shell script")
def test_require_java_asks_the_one_in_java_home(no_jvm, tmp_path):
    no_jvm.setenv("JAVA_HOME", str(java_that_says(tmp_path, 'openjdk version "17.0.2"')))
    require_java()
    (tmp_path / "bin" / "java").write_text("#!/bin/sh\necho 'java version \"1.8.0_9\"' >&2\n")
    with pytest.raises(SetupError, match=r"Spark cannot start: found 8 .*apt-get install"):
        require_java()


def test_require_java_does_not_fall_back_to_the_path_when_java_home_is_wrong(no_jvm, tmp_path):
    no_jvm.setenv("JAVA_HOME", str(tmp_path))
    with pytest.raises(SetupError, match="no bin/java in JAVA_HOME"):
        require_java()


def test_require_java_accepts_a_running_jvm(no_jvm, tmp_path):
    no_jvm.setenv("JAVA_HOME", str(tmp_path))
    no_jvm.setenv("PYSPARK_GATEWAY_PORT", "25333")
    require_java()
    no_jvm.delenv("PYSPARK_GATEWAY_PORT")
    with pytest.raises(SetupError):
        require_java()


def test_diagnose_looks_at_everything_once():
    findings = diagnose()
    what = [finding.what for finding in findings]
    assert len(set(what)) == len(what)
    assert {"Python", "Java", "pyspark", "pandas", "pyarrow", "zmq CURVE", "free disk", "cores", "memory"} <= set(what)
    assert all(finding.ok or finding.advice for finding in findings)
    assert next(finding for finding in findings if finding.what == "Python").ok


def test_a_package_that_cannot_be_imported_is_a_finding(monkeypatch):
    monkeypatch.setitem(sys.modules, "msgspec", None)
    finding = next(finding for finding in diagnose() if finding.what == "msgspec")
    assert not finding.ok
    assert finding.found.startswith("cannot be imported (ModuleNotFoundError")
    assert "pip install" in finding.advice


def test_a_temporary_folder_that_cannot_be_written_is_a_finding(monkeypatch):
    def refuse():
        raise FileNotFoundError("no usable temporary directory")

    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)
    finding = next(finding for finding in diagnose() if finding.what == "temporary folder")
    assert not finding.ok
    assert "TMPDIR" in finding.advice


@pytest.mark.parametrize(
    ("master", "partitions"),
    [
        ("local", "1"),
        ("local[4]", "4"),
        ("local[*]", str(os.cpu_count() or 1)),
        ("local[2,3]", "2"),
        ("local-cluster[2,3,1024]", "6"),
    ],
)
def test_a_local_session_exchanges_over_as_many_partitions_as_it_has_cores(master, partitions):
    assert default_conf(master)["spark.sql.shuffle.partitions"] == partitions


def test_a_local_session_uses_unix_sockets_for_python_workers_where_available(monkeypatch):
    assert default_conf("local[2]")["spark.python.unix.domain.socket.enabled"] == "true"
    monkeypatch.delattr(socket, "AF_UNIX")
    assert "spark.python.unix.domain.socket.enabled" not in default_conf("local[2]")


def test_a_cluster_keeps_its_own_settings():
    assert default_conf("spark://host:7077") == {
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.shuffle.reduceLocality.enabled": "false",
    }


@pytest.mark.parametrize(
    ("defaults", "found"),
    [
        (None, "in sessions of local_session; on a cluster make yours with spark.shuffle.reduceLocality.enabled=false"),
        ("spark.shuffle.reduceLocality.enabled true\n", "in sessions of local_session"),
        ("# spark.shuffle.reduceLocality.enabled false\n", "in sessions of local_session"),
        ("spark.x 1\nspark.shuffle.reduceLocality.enabled   false\n", "in every session, by spark-defaults.conf"),
        ("spark.shuffle.reduceLocality.enabled=false", "in every session, by spark-defaults.conf"),
    ],
)
def test_doctor_says_in_which_sessions_partitions_stick(
    defaults: str | None, found: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("SPARK_CONF_DIR", str(tmp_path))
    if defaults is not None:
        (tmp_path / "spark-defaults.conf").write_text(defaults)
    [finding] = [each for each in diagnose() if each.what == "sticky partitions"]
    assert finding.ok, "everything works without"
    assert finding.found.startswith(found)
