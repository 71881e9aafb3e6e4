"""The examples of properties are the same in every run of ``make test``, whatever ran before."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import REPEATABLE, SEARCH_FACTOR, SEARCHING, examples

TESTS = Path(__file__).parents[1]


@pytest.fixture
def searching():
    settings.load_profile(SEARCHING)
    yield
    settings.load_profile(REPEATABLE)


def drawn(count: int = 200) -> list[tuple[int, str]]:
    """The examples of one property."""
    found = []

    @examples(count)
    @given(st.integers(), st.text())
    def any_property(number: int, text: str) -> None:
        found.append((number, text))

    any_property()
    return found


def with_constants(folder: Path) -> None:
    """Load a module with constants that Hypothesis would like to try."""
    file = folder / "constants.py"
    file.write_text(f"NUMBERS = {[10**6 + n for n in range(500)]}\nTEXTS = {[f'text {n}' for n in range(500)]}\n")
    spec = importlib.util.spec_from_file_location("constants_of_a_test", file)
    assert spec is not None
    assert spec.loader is not None
    sys.modules[spec.name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)


def test_examples_repeat_whatever_modules_are_loaded(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    first = drawn()
    with_constants(tmp_path)
    assert drawn() == first


def test_examples_are_the_same_in_another_process():
    code = "from tests.unit.test_examples import *; from tests.examples import *; register_profiles(); print(drawn())"
    run = subprocess.run(
        [sys.executable, "-c", code],
        cwd=TESTS.parent,
        env={**os.environ, "PYTHONHASHSEED": "7", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout.strip() == str(drawn())


def test_the_profile_of_make_test_keeps_no_database_and_has_no_deadline():
    assert settings.get_current_profile_name() == REPEATABLE
    made = examples(7)
    assert (made.derandomize, made.database, made.deadline, made.max_examples) == (True, None, None, 7)


def test_a_search_uses_new_examples_and_more_of_them(searching):
    made = examples(7)
    assert (made.derandomize, made.deadline, made.max_examples) == (False, None, 7 * SEARCH_FACTOR)
    assert made.database is not None
    assert drawn(10) != drawn(10)


def test_no_test_has_settings_of_its_own():
    """They would not follow the profile: a number of examples that no search raises, or a seed that is random."""
    own = [TESTS / "examples.py", Path(__file__)]
    files = [file for file in TESTS.rglob("*.py") if file not in own]
    assert [
        str(file) for file in files if "hypothesis import" in (text := file.read_text()) and "settings(" in text
    ] == []
