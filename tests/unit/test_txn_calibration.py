"""Calibration: storing and loading costs, and errors about broken files."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest

from midstream.errors import SchemaError
from midstream.txn import Calibration
from midstream.txn.calibration import calibrate, default_path, load_calibration, store_calibration

# The module imports kernels, which are compiled when they are first used.
pytestmark = pytest.mark.long


def test_a_stored_calibration_is_loaded_again(tmp_path, monkeypatch):
    monkeypatch.delenv("MIDSTREAM_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_path() == tmp_path / "midstream" / "calibration.json"
    assert load_calibration() == Calibration(), "nothing stored yet: the defaults"
    prices = Calibration(meeting=1.25e-6, queue=3e-7)
    assert store_calibration(prices) == default_path()
    assert load_calibration() == prices
    assert [file.name for file in default_path().parent.iterdir()] == ["calibration.json"], "nothing is left beside it"


def test_a_calibration_file_given_by_path_must_exist(tmp_path):
    with pytest.raises(SchemaError, match=r"no calibration at .*mine.json; create one with: midstream calibrate"):
        load_calibration(tmp_path / "mine.json")


def test_older_files_with_fewer_prices_can_be_read():
    assert Calibration.from_json('{"start": 0.001}') == Calibration(start=0.001)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "must be JSON"),
        ("{", "must be JSON"),
        ("[1, 2]", "a JSON object of prices; found list"),
        ('{"strat": 1e-6}', "no price 'strat'; it has: start, meeting"),
        ('{"start": "fast"}', "price 'start' .* 0 to 1; found 'fast'"),
        ('{"start": -1e-6}', "price 'start' .* found -1e-06"),
        ('{"start": NaN}', "price 'start' .* found nan"),
        ('{"start": true}', "price 'start' .* found True"),
    ],
)
def test_a_broken_file_is_refused_with_the_reason(tmp_path, text, message):
    file = tmp_path / "prices.json"
    file.write_text(text)
    with pytest.raises(SchemaError, match=rf"prices.json is broken: .*{message}.*midstream calibrate"):
        load_calibration(file)


def test_a_file_that_is_not_text_is_refused(tmp_path):
    file = tmp_path / "prices.json"
    file.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(SchemaError, match=r"prices.json cannot be read"):
        load_calibration(file)


def test_costs_not_measured_in_time_keep_their_defaults():
    assert calibrate(threads=1, limit=0.0) == Calibration()


def test_calibrating_yields_storable_costs():
    prices = calibrate(threads=1)
    assert all(value >= 0 for value in asdict(prices).values())
    assert 0 < prices.plan < 1e-4
    assert prices.node > 0
    assert Calibration.from_json(prices.to_json()) == prices
    assert set(json.loads(prices.to_json())) == set(asdict(prices))
