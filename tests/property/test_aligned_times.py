"""Where windows begin, against the calendar of the standard library."""

from datetime import UTC, date, datetime, timedelta
from itertools import pairwise
from zoneinfo import ZoneInfo

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from midstream.data.aligned_times import Alignment
from midstream.data.times import END_OF_TIME

pytestmark = pytest.mark.hypothesis

DAY = 86_400_000_000
EPOCH = date(1970, 1, 1).toordinal()

# Their clocks change in the middle of the night or day, so that the date never goes back.
PLAIN = ("UTC", "Europe/Berlin", "America/New_York", "Asia/Kolkata", "Australia/Lord_Howe", "Asia/Tokyo")
# Midnight is skipped, or comes twice, or a whole day is skipped.
ODD = ("America/Sao_Paulo", "Asia/Beirut", "America/St_Johns", "Pacific/Apia", "Pacific/Kwajalein", "Africa/Cairo")

times = st.integers(-2_000_000_000_000_000, 4_000_000_000_000_000)
offsets = st.integers(0, DAY - 1)


def instant(year, month, day, hour=0, minute=0):
    return int(datetime(year, month, day, hour, minute, tzinfo=UTC).timestamp()) * 1_000_000


@given(st.lists(times, min_size=1, max_size=30), st.sampled_from(PLAIN))
def test_a_day_in_a_zone_is_the_date_on_its_clocks(found, zone):
    days = Alignment(DAY, 0, zone).aligned(np.array(found)) // DAY
    dates = [datetime.fromtimestamp(time // 1_000_000, ZoneInfo(zone)).date().toordinal() - EPOCH for time in found]
    assert days.tolist() == dates


@given(st.lists(times, min_size=1, max_size=30), offsets, st.sampled_from(PLAIN))
def test_an_offset_shifts_the_hour_at_which_days_begin(found, offset, zone):
    days = Alignment(DAY, offset, zone).aligned(np.array(found)) // DAY
    for time, day in zip(found, days.tolist(), strict=True):
        begin = datetime(1970, 1, 1) + timedelta(days=day, microseconds=offset)
        following = begin + timedelta(days=1)
        assert begin.replace(tzinfo=ZoneInfo(zone)) <= instant_of(time) < following.replace(tzinfo=ZoneInfo(zone))


def instant_of(time):
    return datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=time)


@given(st.lists(times, min_size=2, max_size=30), st.sampled_from([*PLAIN, *ODD]), st.sampled_from([1, 2, 7]))
def test_every_time_lies_in_its_window_whatever_the_clocks_do(found, zone, days):
    alignment = Alignment(days * DAY, 0, zone)
    aligned = alignment.aligned(np.array(found))
    begins, ends = alignment.moments(aligned), alignment.moments(aligned + days * DAY)
    assert all(b <= time < e for b, time, e in zip(begins.tolist(), found, ends.tolist(), strict=True))
    # Also one at a time, and in their order.
    assert [alignment.aligned_one(time) for time in found] == aligned.tolist()
    ordered = alignment.aligned(np.array(sorted(found))).tolist()
    assert all(one <= other for one, other in pairwise(ordered))


@pytest.mark.parametrize(
    ("zone", "before", "after"),
    [
        # Midnight of 4 November 2018 was skipped: the day begins at 1:00.
        ("America/Sao_Paulo", instant(2018, 11, 4, 2, 59), instant(2018, 11, 4, 3, 0)),
        # 30 December 2011 was skipped as a whole.
        ("Pacific/Apia", instant(2011, 12, 30, 9, 59), instant(2011, 12, 30, 10, 0)),
    ],
)
def test_where_clocks_skip_midnight_the_day_begins_when_they_skip_it(zone, before, after):
    alignment = Alignment(DAY, 0, zone)
    minute = 60_000_000
    first, second = alignment.aligned_one(before), alignment.aligned_one(after)
    assert first < second
    assert alignment.moments(np.array([second])).tolist() == [after]
    assert alignment.aligned_one(before + minute - 1) == first


@given(st.lists(st.integers(-END_OF_TIME, END_OF_TIME), max_size=10), st.sampled_from([*PLAIN, *ODD]))
def test_times_outside_the_calendar_have_windows_too(found, zone):
    aligned = Alignment(DAY, 0, zone).aligned(np.array(sorted(found), np.int64)).tolist()
    assert len(aligned) == len(found)
    assert all(one <= other for one, other in pairwise(aligned))


@given(st.lists(times, max_size=10), st.integers(1, 10**9), st.integers(0, 10**9))
def test_without_a_zone_windows_are_shifted_by_the_offset(found, every, offset):
    alignment = Alignment(every, offset % every)
    aligned = alignment.aligned(np.array(found, np.int64))
    begins = alignment.moments(aligned // every * every).tolist()
    wanted = [time - (time - offset % every) % every for time in found]
    assert begins == wanted
