"""The tutorial runs in a real kernel, and shows what it says."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parents[2]


def text_of(cell: Any) -> str:
    """What a cell has printed or shown as text."""
    found = [output.get("text") or output.get("data", {}).get("text/plain", "") for output in cell.outputs]
    return "".join(found)


@pytest.mark.slow
# What Jupyter's own packages warn of while they start a kernel is theirs.
@pytest.mark.filterwarnings("ignore:::jupyter_client")
@pytest.mark.filterwarnings("ignore:::nbclient")
def test_the_tutorial_runs_from_its_first_cell_to_its_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("PYSPARK_PYTHON", sys.executable)
    notebook = nbformat.read(ROOT / "examples" / "tutorial.ipynb", as_version=4)
    NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(tmp_path)}}).execute()

    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    flow, shown, explained, changed, broken, inserted, moved, history, end = code
    assert "image/svg+xml" in flow.outputs[0]["data"]
    cards = [output["data"]["text/html"] for output in shown.outputs if "text/html" in output.get("data", {})]
    assert "payments</b> is stopped" in cards[-1], "the card is renewed until the job ends"
    assert "image/svg+xml" in explained.outputs[0]["data"]
    assert text_of(changed).startswith("applied as revision 2 in effect after")
    assert text_of(broken).startswith("rolled back\n")
    assert text_of(inserted).startswith("applied ['payments', 'score', 'large', 'by user', 'count', 'verdicts']")
    assert text_of(moved).startswith("applied in")
    assert text_of(history).count("\n") == 4
    assert text_of(end).endswith("users with a payment lost or counted twice: []\n")
