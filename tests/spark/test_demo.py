"""The demo runs to its end, reports correct figures, and gives each payment exactly one verdict."""

from __future__ import annotations

import io

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rich.console import Console

from examples.fraud.__main__ import main, surge
from examples.fraud.changes import better_pair
from examples.fraud.models import Combine, FirstOpinion, judge, train
from examples.fraud.payments import Bank

SECONDS, RATE = 6.0, 3_000.0


def judged(source, count):
    """All payments with their verdicts by the old pair and by the new one, calling functions one after the other."""
    bank, models = Bank(), train(by_likeness=True)
    rows = pa.Table.from_batches(list(source.rows(0, count, start_us=0)))
    rows = rows.join(bank.customers(), "user").join(bank.merchants(), "merchant").combine_chunks().to_batches()[0]
    models.customer.open()
    rows = models.customer(rows)
    new_fm, new_mc = (update.function for update in better_pair(models))
    found = []
    for merchant, combine in (
        (FirstOpinion(models.merchant), Combine({"p_customer": 0.4, "p_merchant": 0.6})),
        (new_fm, new_mc),
    ):
        merchant.open()
        verdicts = combine(merchant(rows))
        found.append(verdicts.append_column("verdict", judge(verdicts)))
    return found


def identity(rows):
    names = ["time", "user", "merchant", "amount", "p_fraud"]
    return {tuple(row.values()) for row in rows.select(names).to_pylist()}


def alerts(rows):
    return rows.filter(pa.compute.equal(rows["verdict"], "alert"))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_demo_judges_every_payment_once_and_changes_its_models_meanwhile(spark, tmp_path, monkeypatch):
    monkeypatch.setattr("examples.fraud.__main__.PATIENCE_S", 80.0)  # a busy machine must not fail the test
    screen = io.StringIO()
    arguments = ["--seconds", f"{SECONDS:g}", "--rate", f"{RATE:g}", "--plain", "--out", str(tmp_path / "out")]

    summary = main(arguments, spark=spark, console=Console(file=screen, width=160))

    source = Bank().payments(surge(RATE, SECONDS))
    old, new = judged(source, source.total)
    written = pq.read_table(tmp_path / "out" / "alerts")
    by_pair = [written.filter(pa.compute.equal(written["fm"], version)) for version in (1, 2)]
    assert identity(by_pair[0]) <= identity(alerts(old)), "the old pair raises only alerts that it would raise alone"
    assert identity(by_pair[1]) <= identity(alerts(new)), "and so does the new one"
    assert written.num_rows == len(identity(written)), "each payment is judged once"
    assert summary.payments == summary.due == source.total
    assert summary.mixtures == 0
    assert summary.alerts == written.num_rows > 5
    assert summary.frauds == old["fraud"].true_count
    told = screen.getvalue()
    assert "FC" in told
    assert "epoch 0" in told
    assert "FM and MC under load, applied" in told
    assert any(f"it {met}" in told for met in ("met ", "came within", "fell between", "took effect"))
    assert f"0 of {source.total:,} payments met the old FM and the new MC" in told
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
