"""What must hold for the project as a whole: its files, its set-up, and the pages that describe both."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import midstream.version

ROOT = Path(__file__).parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
MEGABYTE = 1_000_000

# A path counts when it starts a word or follows a file scheme: not inside another URL, a longer path or a variable's
# expansion. Written so that this file does not match itself.
MACHINE_PATH = re.compile(
    r"(?:(?<![\w.~:/)}\]$-])|(?<=file://))/(?:work|root|tmp|opt|home|Users|mnt|var/folders)(?=[/\s\"'`),:;]|$)"
)
PACKAGE_HOST = re.compile(
    r"pypi\.\w+|pythonhosted|test-?pypi|anaconda\.(?:org|com)|maven\.(?:org|apache)|artifactory|devpi|nexus\."
    r"|--(?:extra-)?index-url|--find-links|--trusted-host",
    re.IGNORECASE,
)


def project_files() -> list[Path]:
    """The files that are, or would be, under version control."""
    command = ["git", "-C", str(ROOT), "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    try:
        listing = subprocess.run(command, capture_output=True, check=True, text=True).stdout
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not a git checkout: no telling which files belong to the project")
    paths = (ROOT / name for name in listing.split("\0") if name)
    return [path for path in paths if path.is_file()]


def lines_matching(pattern: re.Pattern[str], paths: list[Path]) -> list[str]:
    found = []
    for path in paths:
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue  # a picture or other binary file
        for number, line in enumerate(text.splitlines(), 1):
            if pattern.search(line):
                found.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()[:100]}")
    return found


def declared_ranges() -> list[Requirement]:
    groups = [PYPROJECT["dependencies"], *PYPROJECT["optional-dependencies"].values()]
    return [Requirement(text) for group in groups for text in group]


PINS = ("requirements-dev.txt", "requirements-docs.txt")


def pins(*files: str) -> dict[str, str]:
    lines = [line for file in files or PINS for line in (ROOT / file).read_text(encoding="utf-8").splitlines()]
    return dict(line.split("==") for line in lines if line and not line.startswith("#"))


def make_targets() -> dict[str, str]:
    """Each target of the Makefile that a person may call, with its help line (empty when it has none)."""
    rules = re.findall(r"^([a-z][a-z-]*):(?!=)([^\n]*)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    return {target: rest.partition("## ")[2].strip() for target, rest in rules}


def test_no_file_names_a_path_of_somebodys_machine():
    assert lines_matching(MACHINE_PATH, project_files()) == []


def test_no_file_names_a_package_host():
    this_file = Path(__file__)
    assert lines_matching(PACKAGE_HOST, [path for path in project_files() if path != this_file]) == []


@pytest.mark.parametrize("folder", ["tmp", "root", "work", "home", "Users"])
def test_a_machine_path_is_recognised_where_it_can_occur(folder):
    path = f"/{folder}/x"
    assert all(
        MACHINE_PATH.search(text)
        for text in (path, f'open("{path}")', f"see `{path}`", f"cd /{folder}", f"file://{path}")
    )
    assert not any(MACHINE_PATH.search(text) for text in (f"https://a.org{path}", f"a{path}", f"{{base}}{path}"))


@pytest.mark.parametrize("text", ["https://pypi.org/simple", "--index-url x", "repo1.maven.org"])
def test_a_package_host_is_recognised(text):
    assert PACKAGE_HOST.search(text)


def test_no_file_is_larger_than_a_megabyte():
    large = {str(path.relative_to(ROOT)): size for path in project_files() if (size := path.stat().st_size) > MEGABYTE}
    assert large == {}


def test_every_dependency_is_explained_and_every_explanation_has_its_dependency():
    page = (ROOT / "docs" / "dependencies.md").read_text(encoding="utf-8")
    explained = re.findall(r"^\| `([\w.-]+)` \| [^|]+ \| [^|]+ \|$", page, re.MULTILINE)
    assert sorted(explained) == sorted(requirement.name for requirement in declared_ranges())


def test_development_pins_lie_within_the_declared_ranges():
    pinned = pins()
    for requirement in declared_ranges():
        assert requirement.specifier.contains(pinned.get(requirement.name, "0")), requirement


@pytest.mark.parametrize("file", PINS)
def test_pins_are_names_and_versions_only_and_sorted(file):
    lines = (ROOT / file).read_text(encoding="utf-8").splitlines()
    entries = [line for line in lines if not line.startswith("#")]
    assert all(re.fullmatch(r"[a-z0-9][a-z0-9-]*==[0-9][0-9a-z.]*", line) for line in entries)
    assert list(pins(file)) == sorted(pins(file))


def test_a_version_is_pinned_once():
    development, site = (set(pins(file)) for file in PINS)
    assert development & site == set()


def test_the_site_lists_every_page():
    """Sphinx says the same, but only when the site is made."""
    configuration = (ROOT / "docs" / "site" / "conf.py").read_text(encoding="utf-8")
    pages = [path.relative_to(ROOT).with_suffix("") for path in (ROOT / "docs").glob("*.md")]
    assert [str(page) for page in pages if f'"{page.as_posix()}"' not in configuration] == []


def test_every_make_target_has_a_help_line():
    targets = make_targets()
    assert {"setup", "demo", "test", "test-fast", "lint", "types", "bench", "bench-quick", "clean"} <= set(targets)
    assert [target for target, text in targets.items() if not text] == []


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_make_alone_lists_every_target():
    # Inherited flags of an outer make would change what the inner one prints.
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    shown = subprocess.run(["make"], cwd=ROOT, env=environment, capture_output=True, check=True, text=True).stdout
    assert re.findall(r"^  make (\S+)", shown, re.MULTILINE) == list(make_targets())


def test_the_first_screen_of_the_readme_shows_the_two_commands():
    first_screen = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()[:50]
    commands = {line.split("#")[0].strip().removeprefix("$ ") for line in first_screen}
    assert {"make demo", "make test"} <= commands


def test_ci_runs_the_readmes_test_command_then_lint_and_stops_at_a_failure():
    script = ROOT / ".ci" / "run"
    lines = [line.strip() for line in script.read_text(encoding="utf-8").splitlines()]
    assert os.access(script, os.X_OK)
    assert lines.index("set -euo pipefail") < lines.index("make test") < lines.index("make lint")


def test_the_version_is_kept_in_one_place():
    assert PYPROJECT["dynamic"] == ["version"]
    assert re.fullmatch(r"\d+\.\d+\.\d+", midstream.version.__version__)


def run_check_java(java_home: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "JAVA_HOME": str(java_home)}
    return subprocess.run(["sh", "scripts/check-java"], cwd=ROOT, env=environment, capture_output=True, text=True)


def fake_java(home: Path, banner: str, exit_code: int = 0) -> Path:
    java = home / "bin" / "java"
    java.parent.mkdir(parents=True)
    java.write_text(
        f"#!/bin/sh\necho 'Picked up JAVA_TOOL_OPTIONS: -Xmx1g' >&2\necho '{banner}' >&2\nexit {exit_code}\n"
    )
    java.chmod(0o755)
    return home


@pytest.mark.parametrize("version", ["17.0.15", "21", "25.0.1-ea"])
def test_a_java_that_spark_can_use_passes_in_silence(tmp_path, version):
    result = run_check_java(fake_java(tmp_path, f'openjdk version "{version}" 2025-04-15'))
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


@pytest.mark.parametrize(
    ("banner", "exit_code", "says"),
    [
        ('java version "1.8.0_402"', 0, "which is Java 8"),
        ('openjdk version "11.0.2" 2019-01-15', 0, "which is Java 11"),
        ("Unable to locate a Java Runtime.", 1, "which does not run"),
        ("something else entirely", 0, "whose version is unreadable"),
    ],
)
def test_a_java_that_spark_cannot_use_is_explained(tmp_path, banner, exit_code, says):
    result = run_check_java(fake_java(tmp_path, banner, exit_code))
    assert result.returncode == 1
    assert says in result.stderr
    assert "apt-get install openjdk-17" in result.stderr


def test_a_java_home_without_java_is_named(tmp_path):
    result = run_check_java(tmp_path)
    assert result.returncode == 1
    assert f"JAVA_HOME is {tmp_path}, but there is no bin/java in it" in result.stderr
