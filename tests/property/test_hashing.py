"""The hash of keys against its definition, written a second time: slowly, in plain integers, one value at a time."""

from __future__ import annotations

import subprocess
import sys
from datetime import date, datetime
from decimal import Decimal

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from midstream.data.hashing import bins_of, hash_columns
from midstream.errors import SchemaError

WORD = 2**64
G = 0x9E3779B97F4A7C15


def mix(value: int) -> int:
    value %= WORD
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 % WORD
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB % WORD
    return value ^ (value >> 31)


def scalar_hash(value: object) -> int:
    match value:
        case None:
            return mix(0xA0761D6478BD642F)
        case int():
            return mix(value + G)
        case str():
            return scalar_hash(value.encode())
        case bytes():
            words = [value[at : at + 8] for at in range(0, len(value), 8)] or [b""]
            total = sum(mix(int.from_bytes(word, "little") + number * G) for number, word in enumerate(words, 1))
            return mix(len(value) * 0xD6E8FEB86659FD93 + total)
        case _:
            raise TypeError(value)


def scalar_hash_of_key(key: tuple[object, ...]) -> int:
    first, *others = map(scalar_hash, key)
    for other in others:
        first = mix(first * 0x9FB21C651E98DF25 + other)
    return first


def hashes_of(array: pa.Array) -> list[int]:
    return list(map(int, hash_columns(pa.record_batch({"k": array}), ["k"])))


integers = st.lists(st.none() | st.integers(-(2**63), 2**63 - 1))
texts = st.lists(st.none() | st.text(max_size=40) | st.sampled_from(["", "a", "a\0", "a\0\0", "a" * 8, "a" * 9]))


@given(integers)
def test_integers_hash_as_defined(values):
    assert hashes_of(pa.array(values, pa.int64())) == [scalar_hash(value) for value in values]


@given(texts)
def test_strings_and_their_bytes_hash_as_defined(values):
    expected = [scalar_hash(value) for value in values]
    assert hashes_of(pa.array(values, pa.string())) == expected
    assert hashes_of(pa.array([None if v is None else v.encode() for v in values], pa.binary())) == expected


@given(st.lists(st.none() | st.binary(max_size=600), max_size=8))
def test_long_values_among_short_ones_hash_as_defined(values):
    assert hashes_of(pa.array(values, pa.binary())) == [scalar_hash(value) for value in values]


@given(st.lists(st.none() | st.decimals(-(10**20), 10**20, places=3), max_size=20), st.integers(0, 3))
def test_decimals_hash_as_the_bytes_of_their_unscaled_value(values, skip):
    unscaled = [None if v is None else int(v.scaleb(3)).to_bytes(16, "little", signed=True) for v in values]
    expected = [scalar_hash(value) for value in unscaled[skip:]]
    assert hashes_of(pa.array(values, pa.decimal128(30, 3))[skip:]) == expected
    assert hashes_of(pa.array(values, pa.decimal256(30, 3))[skip:]) == expected


@given(st.lists(st.tuples(st.none() | st.text(max_size=9), st.none() | st.integers(-9, 9)), max_size=20))
def test_several_columns_hash_as_defined_and_in_their_order(keys):
    batch = pa.record_batch(
        {"s": pa.array([s for s, _ in keys], pa.string()), "n": pa.array([n for _, n in keys], pa.int16())}
    )
    assert hash_columns(batch, ["s", "n"]).tolist() == [scalar_hash_of_key(key) for key in keys]
    assert hash_columns(batch, ["n", "s"]).tolist() == [scalar_hash_of_key(key[::-1]) for key in keys]


@given(texts, st.integers(0, 5), st.integers(0, 5))
def test_the_representation_of_a_string_does_not_matter(values, skip, drop):
    stop = max(skip, len(values) - drop)
    expected = [scalar_hash(value) for value in values[skip:stop]]
    for kind in (pa.string(), pa.large_string(), pa.string_view(), pa.dictionary(pa.int8(), pa.string())):
        assert hashes_of(pa.array(values, kind)[skip:stop]) == expected


@given(st.lists(st.none() | st.integers(-128, 127)), st.integers(0, 5))
def test_the_width_of_an_integer_does_not_matter(values, skip):
    expected = [scalar_hash(value) for value in values[skip:]]
    for kind in (pa.int8(), pa.int16(), pa.int32(), pa.int64()):
        assert hashes_of(pa.array(values, kind)[skip:]) == expected


@given(st.lists(st.none() | st.integers(-(10**9), 10**9)), st.integers(0, 5))
def test_times_hash_as_their_microseconds_in_any_unit_and_zone(seconds, skip):
    expected = [scalar_hash(None if s is None else s * 10**6) for s in seconds[skip:]]
    for unit, factor in [("s", 1), ("ms", 10**3), ("us", 10**6), ("ns", 10**9)]:
        for zone in (None, "UTC", "Asia/Tokyo"):
            ticks = [None if s is None else s * factor for s in seconds]
            assert hashes_of(pa.array(ticks, pa.timestamp(unit, zone))[skip:]) == expected


def test_hashes_in_a_long_batch_do_not_depend_on_the_position():
    rows = 20_000  # several of the blocks that hashing works in
    values = [f"user-{index % 7}" * (index % 5) for index in range(rows)]
    assert hashes_of(pa.array(values)) == [scalar_hash(value) for value in values]
    assert hashes_of(pa.array(range(rows))) == [scalar_hash(value) for value in range(rows)]


def test_hashing_does_not_change_the_batch():
    batch = pa.record_batch({"a": pa.array([1, 2]), "b": pa.array([3, 4])})
    hash_columns(batch, ["a", "b"])
    assert batch.to_pydict() == {"a": [1, 2], "b": [3, 4]}


# State on disk is addressed by these numbers. If this test fails, the code is wrong, never the test.
GOLDEN = {
    "n": pa.array([0, 1, -1, 2**63 - 1, None]),
    "s": pa.array(["", "a", "a\0", "user-0000001", None]),
    "d": pa.array([Decimal("0.00"), Decimal("0.01"), Decimal("-0.01"), Decimal("99.99"), None], pa.decimal128(9, 2)),
    "b": pa.array([True, False, True, False, None]),
    "day": pa.array([date(1970, 1, 1), date(2020, 2, 29), date(1900, 1, 1), date(9999, 1, 1), None]),
    "t": pa.array([datetime(1970, 1, 1), datetime(2020, 2, 29, 1, 2, 3, 4), None, None, None], pa.timestamp("us")),
}
PINNED: dict[tuple[str, ...], list[int]] = {
    ("n",): [0xE220A8397B1DCDAF, 0x910A2DEC89025CC1, 0xE4D971771B652C20, 0x2A67D7552E039EA7, 0x7DE53DE772EA694C],
    ("s",): [0x48218226FF3CD4BF, 0x2B2D8216F43B1CE1, 0x3B9F89AAEBC76C6D, 0x8CECC1D691EFB6BC, 0x7DE53DE772EA694C],
    ("d",): [0xBF8F48BF7BA3F0D4, 0x454018A23A13C1CB, 0x4A463DED75BD9B1F, 0xD89E56052A44402F, 0x7DE53DE772EA694C],
    ("b",): [0x910A2DEC89025CC1, 0xE220A8397B1DCDAF, 0x910A2DEC89025CC1, 0xE220A8397B1DCDAF, 0x7DE53DE772EA694C],
    ("day",): [0xE220A8397B1DCDAF, 0xAC8EC3AAC62D7E18, 0x4BE6CF18212CB44D, 0x3D4C929C9036868C, 0x7DE53DE772EA694C],
    ("t",): [0xE220A8397B1DCDAF, 0x1ED242AF3EF0A7C5, 0x7DE53DE772EA694C, 0x7DE53DE772EA694C, 0x7DE53DE772EA694C],
    ("n", "s"): [0x689B2881449A69E1, 0x29B4EB8154C8D126, 0x0A5867DBFDE2AB24, 0xD5CBC31299409180, 0xD4F3DE414396A315],
    ("s", "n", "d"): [
        0xA326E94D9550F13B,
        0x0234856EDEDCF5BB,
        0x7D21830D7AB61CEF,
        0xDCA5165155E0D8E8,
        0xF40D64DBE0A45F2B,
    ],
}


@pytest.mark.parametrize("columns", PINNED)
def test_hashes_never_change(columns):
    assert hash_columns(pa.record_batch(GOLDEN), columns).tolist() == PINNED[columns]


@pytest.mark.long
def test_another_process_gets_the_same_hashes():
    script = (
        "import pyarrow as pa; from midstream.data.hashing import hash_columns;"
        "print(hash_columns(pa.record_batch({'s': ['ann', 'bob', None]}), ['s']).tolist())"
    )
    path = {"PYTHONPATH": ":".join(sys.path), "PYTHONHASHSEED": "1"}
    answer = subprocess.run([sys.executable, "-c", script], env=path, capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == str([scalar_hash(value) for value in ("ann", "bob", None)])


@pytest.mark.parametrize(
    "keys",
    [
        pa.array(range(100_000)),
        pa.array(range(0, 100_000 * 256, 256)),
        pa.array(range(0, 100_000 * 2**40, 2**40)),
        pa.array([f"user-{index:07d}" for index in range(100_000)]),
        pa.array([str(index) for index in range(100_000)]),
        pa.array([b"\0" * (index % 300) + bytes([index // 300 % 256, index // 76800]) for index in range(100_000)]),
    ],
    ids=["sequential", "multiples of 256", "high bits only", "padded strings", "numbers as text", "mostly zeros"],
)
def test_keys_spread_evenly_over_the_bins(keys):
    hashes = hash_columns(pa.record_batch({"k": keys}), ["k"])
    assert len(np.unique(hashes)) == len(keys)
    for bins in (bins_of(hashes), (hashes & np.uint64(255)).astype(np.uint8)):
        counts = np.bincount(bins, minlength=256)
        expected = len(keys) / 256
        chi_square = float(((counts - expected) ** 2 / expected).sum())
        # 255 degrees of freedom: mean 255, standard deviation 22.6; six of them either way.
        assert 120 < chi_square < 391


def test_pairs_of_columns_spread_evenly_and_order_counts():
    left, right = np.divmod(np.arange(90_000), 300)
    batch = pa.record_batch({"a": left, "b": right})
    hashes = hash_columns(batch, ["a", "b"])
    assert len(np.unique(hashes)) == len(hashes)
    assert np.bincount(bins_of(hashes), minlength=256).min() > 250
    assert (hashes == hash_columns(batch, ["b", "a"])).sum() == 300  # where a = b


def test_columns_that_cannot_be_keys_are_refused():
    for array in (pa.array([1.5]), pa.array([[1]]), pa.array([1], pa.duration("us"))):
        with pytest.raises(SchemaError, match="cannot be hashed"):
            hashes_of(array)
    with pytest.raises(SchemaError, match="finer than Spark's microseconds"):
        hashes_of(pa.array([1], pa.timestamp("ns")))
    with pytest.raises(SchemaError, match="no key column"):
        hash_columns(pa.record_batch({"k": [1]}), [])
