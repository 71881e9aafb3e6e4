"""Where windows begin: offsets and time zones, in whole flows; what is refused."""

from collections import Counter
from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

import pyarrow as pa
import pytest

from midstream import Flow, ListSource, MemorySink, agg, sliding, tumbling
from midstream.errors import FlowError
from midstream.flow.graph_format import CODEC
from midstream.flow.windows import Window
from midstream.testing import run_local

BERLIN = ZoneInfo("Europe/Berlin")
HOURS = [datetime(2026, 3, 27, tzinfo=UTC) + timedelta(hours=number) for number in range(120)]
"""Five days, in the middle of which clocks are set forward."""


def counted(window, epochs=3):
    flow, out = Flow("visits"), MemorySink()
    size = len(HOURS) // epochs
    rows = [[{"k": 1, "t": time} for time in HOURS[start : start + size]] for start in range(0, len(HOURS), size)]
    visits = flow.source("visits", ListSource(rows, "k int, t timestamp"), event_time="t", max_ahead=None)
    visits.key_by("by_k", "k").aggregate("count", window=window, n=agg.count()).sink("out", out)
    run_local(flow, close_windows=True)
    return {(row["window_start"], row["window_end"]): row["n"] for row in out.rows}


def test_days_in_a_time_zone_are_those_of_its_clocks():
    found = counted(tumbling("1 day", zone="Europe/Berlin"))
    assert Counter(time.astimezone(BERLIN).date() for time in HOURS) == {
        start.astimezone(BERLIN).date(): count for (start, _), count in found.items()
    }
    lengths = [end - start for start, end in sorted(found)]
    assert lengths == [timedelta(hours=hours) for hours in (24, 24, 23, 24, 24, 24)]


def test_days_that_overlap_follow_the_clocks_too():
    found = counted(sliding("2 days", every="1 day", zone="Europe/Berlin"))
    assert {start.astimezone(BERLIN).hour for start, _ in found} == {0}
    assert sum(found.values()) == 2 * len(HOURS)
    assert all(count == sum(start <= time < end for time in HOURS) for (start, end), count in found.items())


def test_an_offset_shifts_windows():
    found = counted(tumbling("1 day", offset="6 hours"))
    assert {start.hour for start, _ in found} == {6}
    assert all(count == sum(start <= time < end for time in HOURS) for (start, end), count in found.items())
    assert sum(found.values()) == len(HOURS)


def test_a_join_by_days_in_a_time_zone_pairs_rows_of_the_same_day():
    flow, out = Flow("pairs"), MemorySink()
    rows = [[{"k": 1, "t": time, "n": number} for number, time in enumerate(HOURS)]]
    left = flow.source("left", ListSource(rows, "k int, t timestamp, n int"), event_time="t", max_ahead=None)
    right = left.map(
        "renamed", lambda row: {"k": row["k"], "u": row["t"], "m": row["n"]}, returns="k int, u timestamp, m int"
    )
    window = tumbling("1 day", zone="Europe/Berlin")
    left.key_by("by_k", "k").join("both", right.key_by("of_right", "k"), window=window, right_time="u").sink("out", out)
    run_local(flow)
    days = [time.astimezone(BERLIN).date() for time in HOURS]
    wanted = {(n, m) for n, day in enumerate(days) for m, other in enumerate(days) if day == other}
    assert {(row["n"], row["m"]) for row in out.rows} == wanted
    assert len(out.rows) == len(wanted)


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (
            lambda: tumbling("10 seconds", offset="10 seconds"),
            "offset='10 seconds' must be less than size='10 seconds'",
        ),
        (lambda: tumbling("10 seconds", offset="-1 seconds"), "is not a length of time"),
        (
            lambda: sliding("10 seconds", every="5 seconds", offset="6 seconds"),
            "offset='6 seconds' must be less than every='5 seconds'",
        ),
        (
            lambda: tumbling("1 day", zone="Europe/Atlantis"),
            "'Europe/Atlantis' is not a known time zone; use a name like",
        ),
        (lambda: tumbling("1 day", zone="../etc/passwd"), "is not a known time zone"),
        (
            lambda: tumbling("1 day", zone=2),  # type: ignore[arg-type]
            "is not a known time zone",
        ),
        (lambda: tumbling("1 hour", zone="Europe/Berlin"), "whole days, like '1 day' or '7 days'"),
        (lambda: sliding("1 day", every="12 hours", zone="Europe/Berlin"), "whole days, like '1 day' or '7 days'"),
    ],
)
def test_invalid_windows_are_refused(made, message):
    with pytest.raises(FlowError, match=message.replace("(", r"\(")):
        made()


def test_a_description_without_offset_reads_as_it_did_before_there_were_any():
    # Digests of these texts are on disk.
    assert repr(tumbling("1 second")) == "Tumbling(size_us=1000000)"
    assert repr(sliding("2 seconds", every="1 second")) == "Sliding(size_us=2000000, every_us=1000000)"
    assert repr(tumbling("1 day", zone="UTC")) == "Tumbling(size_us=86400000000, zone='UTC')"
    for window in (tumbling("10 seconds", offset="3 seconds"), sliding("2 days", every="1 day", zone="Asia/Tokyo")):
        assert CODEC.decode(CODEC.encode(window, Window), Window, "a window") == window
    assert CODEC.decode({"kind": "tumbling", "size_us": 5}, Window, "a window") == tumbling("5 us")


def test_another_offset_is_another_layout_of_state():
    def layout(window):
        flow = Flow("f")
        rows = flow.source("rows", ListSource([], "k int, t timestamp"), event_time="t")
        made = rows.key_by("by_k", "k").aggregate("n", window=window, n=agg.count())
        made.sink("out", MemorySink())
        spec = flow.graph["n"].spec
        return spec.state_layout([pa.schema([("k", pa.int32()), ("t", pa.timestamp("us", "UTC"))])])

    plain, shifted, local = (
        layout(window)
        for window in (tumbling("1 day"), tumbling("1 day", offset="1 hour"), tumbling("1 day", zone="Asia/Tokyo"))
    )
    assert len({plain, shifted, local}) == 3
