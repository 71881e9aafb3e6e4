"""midstream ships itself to executors as an archive, and everything works from there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from midstream.runtime.spark.shipping import package_zip

SCRIPT = """
import numpy as np
import midstream
from midstream.txn import Batch, Engine, MemoryTables, Program, Table, transaction

accounts = Table("accounts", key="bigint", value="double", default=10.0)

@transaction
def spend(t, e):
    left = t.read(accounts, e.who) - e.amount
    t.require(left >= 0, "not enough")
    t.write(accounts, e.who, left)
    return {"left": left}

program = Program.of(spend.trace({"who": "bigint", "amount": "double"}))
events = {"ts": np.array([1, 2, 3]), "who": np.array([7, 7, 7]), "amount": np.array([6.0, 5.0, 4.0])}
result = Engine(program, threads=1).execute(Batch.of(events, order_by="ts"), MemoryTables())
print(".zip" in midstream.__file__, result.committed.tolist(), result.returned["left"].tolist()[::2])
"""


@pytest.mark.long
def test_transactions_run_from_the_archive(tmp_path: Path) -> None:
    script = tmp_path / "spend.py"
    script.write_text(SCRIPT)
    paths = {"PYTHONPATH": str(package_zip(tmp_path)), "MIDSTREAM_CACHE": str(tmp_path), "HOME": str(tmp_path)}
    ran = subprocess.run(
        [sys.executable, str(script)], env={**os.environ, **paths}, capture_output=True, text=True, check=False
    )
    assert ran.stdout.strip() == "True [True, False, True] [4.0, 0.0]", ran.stderr
