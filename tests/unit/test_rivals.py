"""Rivals are found where they are, and left out with a reason where they are not."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks.rivals import flink
from benchmarks.rivals.install import SUPPORTED, candidates, version_of


def test_without_pyflink_the_message_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flink, "ENVIRONMENT", flink.ROOT / "build" / "nowhere")
    with pytest.raises(flink.Missing, match=r"'make rivals' installs it into build/nowhere .* --pyflink PYTHON names"):
        flink.find()


@pytest.mark.parametrize("python", [sys.executable, "no-such-python"])
def test_a_python_without_it_is_named(python: str) -> None:
    with pytest.raises(flink.Missing, match=f"{python} has no PyFlink"):
        flink.find(python)


def test_pythons_are_asked_for_their_versions() -> None:
    assert version_of(sys.executable) == sys.version_info[:2]
    assert version_of("no-such-python") is None
    assert version_of("false") is None
    assert sys.executable in candidates()
    assert (3, 11) in SUPPORTED


def test_a_script_that_fails_says_so_and_leaves_no_process(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"PyFlink ended with 1:[\s\S]*No module named 'pyflink'"):
        flink.run_script(sys.executable, "smq_pyflink.py", {"folder": str(tmp_path)})
