"""The input of a round: files of orders and payments, drawn from a seed and written before the job starts."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

USERS = 24
ROWS_PER_FILE = 30
STEP_S = 4.0
START = datetime(2026, 1, 1, tzinfo=UTC)
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)

ORDERS_PER_STEP = 2
"""Number of files. Each has its own users, so that a user's rows always come from one partition of the source."""
PAYMENTS_PER_STEP = 1


@dataclass(frozen=True)
class Event:
    """An order or a payment; ``n`` is unique among them, ``time`` in microseconds since 1970."""

    user: str
    n: int
    value: int
    time: int


def write_events(folder: Path, seed: int, steps: int) -> None:
    """Write the files of so many steps below ``folder/orders`` and ``folder/payments``.

    Spark takes old files first, and gives an epoch's largest file to its first partition. Here a file that is older
    is also larger, so rows keep their order even when a crash makes Spark put the files of two steps into one epoch.
    """
    rng = random.Random(seed)
    for name, per_step in (("orders", ORDERS_PER_STEP), ("payments", PAYMENTS_PER_STEP)):
        (folder / name).mkdir(parents=True)
        texts = []
        for number in range(steps * per_step):
            step, part = divmod(number, per_step)
            events = _draw(rng, step, range(part, USERS, per_step), first=number * ROWS_PER_FILE)
            texts.append(
                "".join(json.dumps(asdict(event) | {"time": moment(event.time).isoformat()}) + "\n" for event in events)
            )
        size = max(map(len, texts)) + len(texts)
        for number, text in enumerate(texts):
            path = folder / name / f"{number:04d}.json"
            path.write_text(text.ljust(size - number, "\n"))  # Spark skips empty lines
            os.utime(path, 2 * (1_700_000_000 + number,))


def read_events(paths: Iterable[Path]) -> list[Event]:
    """The rows of files, in the order in which a job sees those of a user."""
    return [event for path in sorted(paths) for event in _read(path)]


def microseconds(time: datetime) -> int:
    """Microseconds since 1970; a time without a zone is in UTC."""
    return ((time if time.tzinfo else time.replace(tzinfo=UTC)) - EPOCH) // timedelta(microseconds=1)


def moment(time: int) -> datetime:
    """A time from microseconds since 1970."""
    return EPOCH + timedelta(microseconds=time)


def _draw(rng: random.Random, step: int, users: range, first: int) -> Iterator[Event]:
    for n in range(first, first + rng.randint(ROWS_PER_FILE // 2, ROWS_PER_FILE)):
        behind = rng.uniform(10, 30) if rng.random() < 0.05 else rng.uniform(-1, 1)
        time = START + timedelta(seconds=STEP_S * (step + rng.random()) - behind)
        yield Event(f"u{rng.choice(users)}", n, rng.randint(1, 100), microseconds(time))


def _line(event: Event) -> str:
    return json.dumps(asdict(event) | {"time": moment(event.time).isoformat()}) + "\n"


def _read(path: Path) -> Iterator[Event]:
    for line in path.read_text().splitlines():
        if line:
            row = json.loads(line)
            yield Event(**row | {"time": microseconds(datetime.fromisoformat(row["time"]))})
