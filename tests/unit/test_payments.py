"""The payments workload is what it says, and the fraud flow gives what a computation without midstream gives."""

from __future__ import annotations

import pickle

import cloudpickle
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from typer.testing import CliRunner

from examples.fraud.flow import build
from examples.fraud.models import ALERT_AT, train
from examples.fraud.payments import COLUMNS, FRAUD_RATE, Bank
from midstream import MemorySink
from midstream.cli.app import app
from midstream.data.schema import parse_ddl
from midstream.testing import Faults, run_local

BANK = Bank()


def table(source, start=0, end=10_000):
    return pa.Table.from_batches(list(source.rows(start, end, start_us=0)))


@pytest.fixture(scope="module")
def payments():
    """Twenty days of payments."""
    return table(BANK.payments(rate=1000), end=400_000).to_pandas()


@pytest.fixture(scope="module")
def models():
    return train(payments=30_000)


# ── the workload ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_payment_has_the_twelve_columns_of_the_paper_and_the_time_it_is_due():
    source = BANK.payments(rate=1000)
    assert len(parse_ddl(COLUMNS)) == 12
    assert source.schema.names == [*parse_ddl(COLUMNS).names, "event_time"]
    assert table(source).schema.equals(source.schema)


def test_the_same_seed_gives_the_same_payments_however_they_are_cut():
    whole = table(BANK.payments(rate=1000))
    pieces = [table(Bank().payments(rate=1000), start, end) for start, end in ((0, 1), (1, 5000), (5000, 10_000))]
    assert pa.concat_tables(pieces).equals(whole)


def test_another_seed_gives_other_payments_between_the_same_people():
    one, other = (table(BANK.payments(rate=1000, seed=seed)).to_pandas() for seed in (1, 2))
    assert not one.user.equals(other.user)
    places = pd.concat([one, other]).groupby("merchant")[["city", "zip", "mcc"]].nunique(dropna=False)
    assert (places == 1).all(axis=None)


def test_another_bank_is_another_world():
    assert not Bank(seed=1).customers().equals(BANK.customers())


def test_a_worker_that_gets_the_description_makes_the_same_payments():
    source = BANK.payments(rate=1000)
    shipped = cloudpickle.dumps(source)
    assert len(shipped) < 2_000  # the description, not the tables made from it
    assert table(pickle.loads(shipped)).equals(table(source))


def test_about_one_payment_in_a_thousand_is_a_fraud(payments):
    assert payments.fraud.mean() == pytest.approx(FRAUD_RATE, rel=0.2)


@pytest.mark.parametrize("fraud_rate", [0.0, 0.05])
def test_another_fraud_rate_can_be_asked_for(fraud_rate):
    day = table(BANK.payments(rate=1000, fraud_rate=fraud_rate), end=20_000).to_pandas()
    assert day.fraud.mean() == pytest.approx(fraud_rate, rel=0.2)


def test_customers_follow_zipfs_law(payments):
    counts = np.sort(payments.user.value_counts().to_numpy())[::-1]
    ranks = np.arange(1, 201)
    slope, _ = np.polyfit(np.log(ranks), np.log(counts[:200]), 1)
    assert slope == pytest.approx(-BANK.skew, abs=0.05)


def test_merchants_are_skewed_too(payments):
    shares = payments.merchant.value_counts(normalize=True)
    assert shares.iloc[:20].sum() > 0.15
    assert shares.iloc[0] > 20 * shares.mean()


def test_without_skew_customers_are_alike():
    counts = table(Bank(users=100, skew=0).payments(rate=1000), end=50_000).to_pandas().user.value_counts()
    assert len(counts) == 100
    assert counts.max() < 1.5 * counts.min()


def test_times_increase_and_nights_are_quiet(payments):
    assert payments.time.is_monotonic_increasing
    assert (payments.time.dt.hour < 6).mean() < 0.06
    assert payments.time.dt.normalize().nunique() == 20


def test_online_payments_have_no_state_and_no_zip(payments):
    online = payments.chip_use == "online"
    assert 0.1 < online.mean() < 0.3
    assert (payments.city == "ONLINE").equals(online)
    assert payments.state.isna().equals(online)
    assert payments.zip.isna().equals(online)


def test_frauds_differ_in_amount_hour_use_of_the_chip_merchant_and_place(payments):
    known = payments.merge(BANK.customers().to_pandas()).merge(BANK.merchants().to_pandas())
    fraud, honest = known[known.fraud], known[~known.fraud]
    assert len(fraud) + len(honest) == len(payments)
    assert fraud.amount.median() > 5 * honest.amount.median()
    assert (fraud.time.dt.hour < 6).mean() > 3 * (honest.time.dt.hour < 6).mean()
    assert (fraud.chip_use == "chip").mean() < 0.2 < 0.5 < (honest.chip_use == "chip").mean()
    assert (fraud.risk > 0.5).mean() > 0.7 > 0.2 > (honest.risk > 0.5).mean()
    assert (fraud.city == fraud.home_city).mean() < 0.2 < 0.6 < (honest.city == honest.home_city).mean()


# ── the flow ──────────────────────────────────────────────────────────────────────────────────────────────────────


def expected_alerts(source, count, models):
    """Figure 1 without midstream: pandas joins, features by hand, the trained trees, the weighted mean."""
    rows = table(source, end=count).to_pandas()
    rows = rows.merge(BANK.customers().to_pandas(), on="user", validate="many_to_one")
    rows = rows.merge(BANK.merchants().to_pandas(), on="merchant", validate="many_to_one")
    chip, online, hour = rows.chip_use == "chip", rows.chip_use == "online", rows.time.dt.hour
    excess, away, failed = np.log(rows.amount / rows.usual_amount), rows.city != rows.home_city, rows.errors.notna()
    customer = (excess, away, hour, chip, online, failed)
    merchant = (np.log(rows.amount / rows.usual_ticket), rows.risk, hour, chip, online, rows.errors == "Bad CVV")
    rows["p_customer"] = _probability(models.customer, customer)
    rows["p_merchant"] = _probability(models.merchant, merchant)
    rows["p_fraud"] = 0.4 * rows.p_customer + 0.6 * rows.p_merchant
    rows["fm"] = rows["mc"] = 1
    return rows[rows.p_fraud >= ALERT_AT]


def _probability(model, features):
    return pickle.loads(model._trained).predict_proba(np.column_stack(features).astype(float))[:, 1]


@pytest.mark.parametrize(
    ("seed", "faults"),
    [
        (0, Faults()),
        pytest.param(1, Faults(crash=0.02, speculate=0.1, repeat=0.1, give_up=0.005), marks=pytest.mark.long),
    ],
)
def test_alerts_are_those_of_a_computation_without_midstream(models, seed, faults):
    source = BANK.payments(rate=1000, fraud_rate=0.05, limit=1500, max_rows_per_epoch=600)
    alerts = MemorySink()
    run = run_local(build(source, alerts, models), seed=seed, faults=faults)
    found = pd.DataFrame(alerts.rows).sort_values("event_time", ignore_index=True)
    wanted = expected_alerts(source, 1500, models).sort_values("event_time", ignore_index=True)
    assert 20 < len(wanted) < 500
    assert set(found.columns) == set(wanted.columns)
    pd.testing.assert_frame_equal(found[wanted.columns], wanted, check_dtype=False)
    verdict = next(stats for stats in run.metrics.operators if stats.operator == "verdict")
    assert (verdict.rows_in, verdict.rows_out, run.metrics.epochs) == (1500, 1500, 3)


def test_most_alerts_are_frauds_and_most_frauds_are_alerted(models):
    alerts = expected_alerts(BANK.payments(rate=1000, seed=7), 200_000, models)
    frauds = table(BANK.payments(rate=1000, seed=7), end=200_000)["fraud"].to_numpy().sum()
    assert alerts.fraud.mean() > 0.5
    assert alerts.fraud.sum() / frauds > 0.5


def test_training_again_gives_the_same_models():
    first, again = train(payments=5000), train(payments=5000)
    assert first.customer._trained == again.customer._trained
    assert first.merchant._trained == again.merchant._trained


def test_the_command_line_draws_the_flow():
    result = CliRunner().invoke(app, ["graph", "examples.fraud.flow:flow", "--stages"])
    assert result.exit_code == 0, result.output
    assert "FM" in result.output
    assert "[stage 2]" in result.output
