"""The demo runs from beginning to end, tells the truth, and gives each payment exactly one verdict."""

from __future__ import annotations

import io

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rich.console import Console

from benchmarks.workloads.payments import Bank
from examples.fraud.__main__ import main, surge
from examples.fraud.models import Combine, alert_or_pass, train


def judged(source, count):
    """All payments with their verdicts, by calling the functions one after the other."""
    bank, models = Bank(), train()
    rows = pa.Table.from_batches(list(source.rows(0, count, start_us=0)))
    rows = rows.join(bank.customers(), "user").join(bank.merchants(), "merchant").combine_chunks().to_batches()[0]
    for model in (models.customer, models.merchant):
        model.open()
        rows = model(rows)
    rows = Combine({"p_customer": 0.4, "p_merchant": 0.6})(rows)
    return rows.append_column("verdict", alert_or_pass(rows))


def identity(rows):
    names = ["time", "user", "merchant", "amount", "p_fraud"]
    return sorted(tuple(row.values()) for row in rows.select(names).to_pylist())


@pytest.mark.timeout(300)
def test_the_demo_judges_every_payment_once_and_tells_how_well(spark, tmp_path, monkeypatch):
    monkeypatch.setattr("examples.fraud.__main__.PATIENCE_S", 80.0)  # a busy machine must not fail the test
    screen = io.StringIO()
    arguments = ["--seconds", "1.5", "--rate", "12000", "--plain", "--out", str(tmp_path / "out")]

    summary = main(arguments, spark=spark, console=Console(file=screen, width=120))

    truth = judged(Bank().payments(surge(12_000, 1.5)), 12_000)
    wanted = truth.filter(pa.compute.equal(truth["verdict"], "alert"))
    written = pq.read_table(tmp_path / "out" / "alerts")
    assert identity(written) == identity(wanted)
    assert summary.payments == summary.due == 12_000
    assert summary.latency_ms.count == 12_000
    assert summary.alerts == written.num_rows > 5
    assert summary.caught == wanted["fraud"].true_count
    assert summary.frauds == truth["fraud"].true_count
    told = screen.getvalue()
    assert "FC" in told
    assert "epoch 0" in told
    assert f"precision {summary.precision:.0%}" in told
    assert str(summary.folder) in told


def test_a_folder_that_is_in_use_is_refused_before_anything_starts(tmp_path, capsys):
    (tmp_path / "mine.txt").write_text("precious")
    with pytest.raises(SystemExit):
        main(["--out", str(tmp_path)])
    assert "is not empty" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--seconds", "0"], ["--rate", "-1"]])
def test_a_demo_without_payments_is_refused(arguments):
    with pytest.raises(SystemExit):
        main(arguments)
