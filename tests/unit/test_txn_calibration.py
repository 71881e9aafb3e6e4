"""The machine's prices: how they are kept, and what is said about a file that is broken."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest

from midstream.errors import SchemaError
from midstream.txn import Calibration
from midstream.txn.calibration import calibrate, default_path, load_calibration, store_calibration

# The module imports kernels, which are compiled when they are first used.
pytestmark = pytest.mark.long


def test_prices_are_stored_and_found_again(tmp_path, monkeypatch):
    monkeypatch.delenv("MIDSTREAM_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_path() == tmp_path / "midstream" / "calibration.json"
    assert load_calibration() == Calibration(), "nothing stored yet: the defaults"
    prices = Calibration(meeting=1.25e-6, queue=3e-7)
    assert store_calibration(prices) == default_path()
    assert load_calibration() == prices
    assert [file.name for file in default_path().parent.iterdir()] == ["calibration.json"], "nothing is left beside it"


def test_a_file_that_was_asked_for_has_to_be_there(tmp_path):
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
def test_a_broken_file_is_named_with_what_is_wrong_in_it(tmp_path, text, message):
    file = tmp_path / "prices.json"
    file.write_text(text)
    with pytest.raises(SchemaError, match=rf"prices.json is broken: .*{message}.*midstream calibrate"):
        load_calibration(file)


def test_a_file_that_is_no_text_is_named(tmp_path):
    file = tmp_path / "prices.json"
    file.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(SchemaError, match=r"prices.json cannot be read"):
        load_calibration(file)


def test_what_cannot_be_measured_in_time_keeps_its_default():
    assert calibrate(threads=1, limit=0.0) == Calibration()


def test_calibrating_gives_prices_that_can_be_stored():
    prices = calibrate(threads=1)
    assert all(value >= 0 for value in asdict(prices).values())
    assert 0 < prices.plan < 1e-4
    assert prices.node > 0
    assert Calibration.from_json(prices.to_json()) == prices
    assert set(json.loads(prices.to_json())) == set(asdict(prices))
