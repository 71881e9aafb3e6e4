"""The expected results of a round: the oracle, and the comparison with sinks, state and files.

The oracle knows the input files, and from Spark's own logs which of them each epoch had: a crash between two of these
logs makes Spark put the files of two steps into one epoch. It remembers all rows and looks at them again in each epoch,
and shares nothing with midstream; :mod:`tests.chaos.job` is the same computation as a flow.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from midstream.checkpoint.inspection import read_state
from midstream.checkpoint.location import Checkpoint
from midstream.flow.sink_owner import EPOCH_COLUMN
from midstream.ids import Epoch
from midstream.state.lineage import Lineage
from tests.chaos.events import Event, microseconds, moment, read_events

SECOND = 1_000_000
DELAYS = {"orders": 3 * SECOND, "payments": 4 * SECOND}
QUIET = 8 * SECOND
WINDOW = 5 * SECOND
WITHIN = 3 * SECOND
ITEMS, STOCK = 5, 3_000

SINKS = {
    "habits": ("user", "count", "recent", "quiet"),
    "numbers": ("of", "user", "window_end", "n", "total"),
    "pairs": ("user", "n", "value", "time", "paid_n", "paid", "paid_time"),
    "late": ("of", "user", "n", "value", "time"),
}
"""Columns in the order in which rows are compared."""

STRAYS_PER_KILL = 28
"""Files of state: seven operators, two partitions, a delta and a rewrite each."""

Rows = Counter[tuple[Any, ...]]


# ── the oracle ────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass
class Habits:
    """The state of one user."""

    count: int = 0
    recent: list[int] = field(default_factory=list)
    due: int | None = None


@dataclass
class Oracle:
    """All input so far, and the expected output by sink: rows with the epoch first."""

    orders: list[Event] = field(default_factory=list)
    payments: list[Event] = field(default_factory=list)
    """Orders and payments that were in time for their partners."""
    habits: dict[str, Habits] = field(default_factory=dict)
    spent: dict[str, tuple[int, int]] = field(default_factory=dict)
    open: dict[tuple[str, int], tuple[int, int]] = field(default_factory=dict)
    """Windows by user and end."""
    of_all: dict[int, tuple[int, int]] = field(default_factory=dict)
    stock: dict[int, int] = field(default_factory=dict)
    owned: dict[str, int] = field(default_factory=dict)
    met: set[int] = field(default_factory=set)
    """Orders that have found a partner, or got nulls for one."""
    latest: dict[str, int] = field(default_factory=dict)
    emitted: dict[str, Rows] = field(default_factory=lambda: {sink: Counter() for sink in SINKS})

    @property
    def watermark(self) -> int | None:
        """The smallest of the sources' latest times, each less its delay."""
        if self.latest.keys() < DELAYS.keys():
            return None
        return min(self.latest[source] - delay for source, delay in DELAYS.items())

    def epoch(self, number: int, orders: list[Event], payments: list[Event]) -> None:
        """Process the next epoch."""
        before = self.watermark
        for source, events in (("orders", orders), ("payments", payments)):
            times = [event.time for event in events]
            if times:
                self.latest[source] = max(*times, self.latest.get(source, times[0]))
        parts = {
            "habits": self._habits(orders),
            "numbers": [*self._spent(orders), *self._windows(orders, before), *self._sales(orders)],
            "pairs": self._pairs(_in_time(orders, before), _in_time(payments, before)),
            "late": _late(orders, payments, before),
        }
        for sink, rows in parts.items():
            self.emitted[sink].update((number, *row) for row in rows)

    def _over(self, time: int) -> bool:
        return self.watermark is not None and time <= self.watermark

    def _habits(self, orders: list[Event]) -> Iterator[tuple[Any, ...]]:
        for event in orders:
            of = self.habits.setdefault(event.user, Habits())
            of.count += 1
            of.recent = [*of.recent, event.value][-3:]
            of.due = event.time + QUIET if of.due is None else max(of.due, event.time + QUIET)
            yield event.user, of.count, tuple(of.recent), False
        for user, of in self.habits.items():
            if of.due is not None and self._over(of.due):
                yield user, of.count, tuple(of.recent), True
                of.recent, of.due = [], None

    def _spent(self, orders: list[Event]) -> Iterator[tuple[Any, ...]]:
        for event in orders:
            self.spent[event.user] = _plus(self.spent.get(event.user), event.value)
        for user in {event.user for event in orders}:
            yield "user", user, None, *self.spent[user]

    def _windows(self, orders: list[Event], before: int | None) -> Iterator[tuple[Any, ...]]:
        for event in orders:
            if before is None or _end(event) > before:
                place = event.user, _end(event)
                self.open[place] = _plus(self.open.get(place), event.value)
        closed = [place for place in self.open if self._over(place[1])]
        for user, end in closed:
            n, total = self.open.pop((user, end))
            self.of_all[end] = _plus(self.of_all.get(end), total)
            yield "window", user, end, n, total
        for end in {end for _, end in closed}:
            yield "all", None, end, *self.of_all[end]

    def _sales(self, orders: list[Event]) -> Iterator[tuple[Any, ...]]:
        for event in sorted(orders, key=lambda event: event.n):
            item = event.value % ITEMS
            left = self.stock.get(item, STOCK) - event.value
            if left >= 0:
                self.stock[item] = left
                self.owned[event.user] = self.owned.get(event.user, 0) + event.value
            yield "sale", event.user, None, event.n, left if left >= 0 else None

    def _pairs(self, orders: list[Event], payments: list[Event]) -> Iterator[tuple[Any, ...]]:
        new = {id(event) for event in (*orders, *payments)}
        self.orders += orders
        self.payments += payments
        for order in self.orders:
            for paid in self.payments:
                near = order.user == paid.user and abs(order.time - paid.time) <= WITHIN
                if near and (id(order) in new or id(paid) in new):
                    self.met.add(order.n)
                    yield order.user, order.n, order.value, order.time, paid.n, paid.value, paid.time
        for order in self.orders:
            if order.n not in self.met and self._over(order.time + WITHIN + 1):
                self.met.add(order.n)
                yield order.user, order.n, order.value, order.time, None, None, None


def _plus(total: tuple[int, int] | None, value: int) -> tuple[int, int]:
    n, so_far = total or (0, 0)
    return n + 1, so_far + value


def _end(event: Event) -> int:
    return (event.time // WINDOW + 1) * WINDOW


def _in_time(events: list[Event], before: int | None) -> list[Event]:
    return [event for event in events if before is None or event.time >= before]


def _late(orders: list[Event], payments: list[Event], before: int | None) -> Iterator[tuple[Any, ...]]:
    def row(of: str, event: Event) -> tuple[Any, ...]:
        return of, event.user, event.n, event.value, event.time

    if before is None:
        return
    yield from (row("window", event) for event in orders if _end(event) <= before)
    yield from (row("payment", event) for event in orders if event.time < before)
    yield from (row("order", event) for event in payments if event.time < before)


# ── the files of each epoch ───────────────────────────────────────────────────────────────────────────────────────


def epochs_of(folder: Path) -> list[dict[str, list[Path]]]:
    """The files of each source, by epoch, from Spark's log."""
    spark = folder / "checkpoint" / "spark"
    ends = [_ends(spark / "offsets" / str(epoch)) for epoch in range(len(_numbered(spark / "offsets")))]
    found: list[dict[str, list[Path]]] = [{} for _ in ends]
    for place, source in enumerate(DELAYS):
        listed = _listed(spark / "sources" / str(place))
        start = -1
        for epoch, end in enumerate(ends):
            found[epoch][source] = [path for path, number in listed.items() if start < number <= end[place]]
            start = end[place]
    return found


def _numbered(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if path.name.isdigit()]


def _ends(path: Path) -> list[int]:
    """The last entry of its log of files that was read, for each source."""
    return [json.loads(line)["logOffset"] for line in path.read_text().splitlines()[2:]]


def _listed(folder: Path) -> dict[Path, int]:
    """All files that a source has seen, with their entries in its log."""
    listed = {}
    for path in folder.iterdir():
        if path.name.removesuffix(".compact").isdigit():
            for line in path.read_text().splitlines()[1:]:
                entry = json.loads(line)
                listed[Path(entry["path"].removeprefix("file://"))] = entry["batchId"]
    return listed


# ── the comparison ────────────────────────────────────────────────────────────────────────────────────────────────


def problems(folder: Path, kills: int) -> list[str]:
    """All deviations from the expected results after a round in this folder."""
    epochs = epochs_of(folder)
    found = list(_files_read(folder, epochs))
    oracle = Oracle()
    for number, files in enumerate(epochs):
        oracle.epoch(number, *(read_events(files[source]) for source in DELAYS))
    for sink, columns in SINKS.items():
        found += _compare(f"sink {sink!r}", oracle.emitted[sink], Counter(_written(folder / "out" / sink, columns)))
    found += _states(str(folder / "checkpoint"), oracle)
    found += _strays(folder / "checkpoint", len(epochs), kills)
    return found


def rows_read(folder: Path) -> int:
    """The number of rows in the input of a round."""
    return sum(len(read_events((folder / "in" / source).iterdir())) for source in DELAYS)


def _files_read(folder: Path, epochs: list[dict[str, list[Path]]]) -> Iterator[str]:
    for source in DELAYS:
        there = Counter((folder / "in" / source).iterdir())
        yield from _compare(f"input {source!r}", there, Counter(path for files in epochs for path in files[source]))


def _compare(what: str, expected: Counter[Any], found: Counter[Any]) -> Iterator[str]:
    for word, rows in (("lacks", expected - found), ("has too much", found - expected)):
        if rows:
            shown = ", ".join(map(str, sorted(rows, key=str)[:3]))
            yield f"{what} {word}: {rows.total()} of {expected.total()}, e.g. {shown}"


def _written(folder: Path, columns: tuple[str, ...]) -> Iterator[tuple[Any, ...]]:
    """The rows of a sink, with their epoch first; as readers of tables do, it skips what starts with _ or a dot."""
    for part in folder.glob("[!._]*"):
        for row in pq.ParquetFile(part).read().select([EPOCH_COLUMN, *columns]).to_pylist():
            yield tuple(_plain(value) for value in row.values())


def _plain(value: Any) -> Any:
    if isinstance(value, datetime):
        return microseconds(value)
    return tuple(value) if isinstance(value, list) else value


def _states(checkpoint: str, oracle: Oracle) -> Iterator[str]:
    def held(operator: str, *columns: str) -> Rows:
        table = read_state(checkpoint, operator)
        table = table.select(columns or table.column_names)
        return Counter(tuple(_plain(value) for value in row.values()) for row in table.to_pylist())

    expected: Rows = Counter()
    for user, of in oracle.habits.items():
        due = None if of.due is None else moment(of.due)
        expected[user, "value", None, None, repr((of.count, due))] += 1
        if of.recent:
            expected[user, "list", "recent", None, repr(of.recent)] += 1
        if of.due is not None:
            expected[user, "event timer", None, of.due, None] += 1
    yield from _compare("state of 'habit'", expected, held("habit"))
    spent = Counter((user, *total) for user, total in oracle.spent.items())
    yield from _compare("state of 'spent'", spent, held("spent"))
    windows = Counter((user, end, *total) for (user, end), total in oracle.open.items())
    yield from _compare("state of 'by window'", windows, held("by window", "user", "window_end", "n", "total"))
    of_all = Counter((end, *total) for end, total in oracle.of_all.items())
    yield from _compare("state of 'of all'", of_all, held("of all"))
    for name, wanted in (("stock", oracle.stock), ("owned", oracle.owned)):
        yield from _compare(f"table {name!r}", Counter(wanted.items()), held(name))
    yield from _join_state(set(held("pay", "user", "side")), oracle)


def _join_state(held: set[tuple[Any, ...]], oracle: Oracle) -> Iterator[str]:
    """A join must keep what may get partners, and may keep what is near that, but not more."""
    sides = {"left": oracle.orders, "right": oracle.payments}
    limit = oracle.watermark or 0

    def users(reach: int) -> set[tuple[Any, ...]]:
        return {(event.user, side) for side, events in sides.items() for event in events if event.time + reach >= limit}

    if missing := users(WITHIN) - held:
        yield f"state of 'pay' lacks {sorted(missing)[:3]}"
    if more := held - users(3 * WITHIN):
        yield f"state of 'pay' still has {sorted(more)[:3]}"


def _strays(checkpoint: Path, epochs: int, kills: int) -> Iterator[str]:
    """State files that no restart needs: only killed processes may leave some."""
    folder = checkpoint / "state"
    there = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    needed: set[str] = set()
    for epoch in range(max(0, epochs - 2), epochs):
        needed.update(_needed(checkpoint, Epoch(epoch)))
    if missing := needed - there:
        yield f"state lacks {len(missing)} files, e.g. {sorted(missing)[0]}"
    strays = sorted(there - needed)
    if len(strays) > kills * STRAYS_PER_KILL:
        yield f"state has {len(strays)} files that nobody needs after {kills} kills, e.g. {', '.join(strays[:3])}"


def _needed(checkpoint: Path, epoch: Epoch) -> Iterator[str]:
    """The state files that a manifest names."""
    manifest = Checkpoint.of_any_flow(str(checkpoint)).manifest(epoch)
    assert manifest is not None, f"epoch {epoch} has been committed"
    for lineage in manifest.lineages.values():
        yield from (entry.file.name for entry in Lineage.decode(lineage).entries)
