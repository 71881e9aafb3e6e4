"""Word count, the workload of the Megaphone paper: pairs (key, value), and a running total per key.

The flow is small so that its state is not: with :data:`LARGE` keys almost all that happens is state.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from midstream import Flow, GeneratorSource, agg
from midstream.flow.schedules import Indexes, Schedule
from midstream.flow.sinks import SinkTarget

__all__ = ["LARGE", "SMALL", "flow", "oracle", "words"]

SMALL = 1_000
"""Keys, for tests."""
LARGE = 10_000_000
"""Keys, as in the paper."""

LARGEST_VALUE = 100


def words(rate: Schedule | float, *, keys: int = LARGE, skew: float = 0.0, **options: Any) -> GeneratorSource:
    """The stream of pairs. ``skew`` is the exponent of Zipf's law, 0 makes all keys alike; options as the source's.

    >>> [batch] = words(rate=1000, keys=5, seed=1).rows(0, 3, start_us=0)
    >>> batch.schema.names, max(batch["key"].to_pylist()) < 5
    (['key', 'value', 'event_time'], True)
    """
    return GeneratorSource(partial(_make, keys, skew), "key bigint, value bigint", rate, **options)


def flow(source: Any, sink: SinkTarget) -> Flow:
    """Totals go to ``sink``: after each epoch, those of the keys that it touched. Keys may be of any type."""
    flow = Flow("word_count")
    pairs = flow.source("words", source)
    pairs.key_by("by_key", "key").aggregate("count", total=agg.sum("value")).sink("totals", sink)
    return flow


def oracle(epochs: Iterable[pa.Table]) -> Iterator[list[dict[str, Any]]]:
    """What each epoch must give, in any order.

    >>> list(oracle([pa.table({"key": ["a", "a"], "value": [1, 2]}), pa.table({"key": ["a"], "value": [4]})]))
    [[{'key': 'a', 'total': 3}], [{'key': 'a', 'total': 7}]]
    """
    totals: Counter[Any] = Counter()
    for rows in epochs:
        keys = rows["key"].to_pylist()
        for key, value in zip(keys, rows["value"].to_pylist(), strict=True):
            totals[key] += value
        yield [{"key": key, "total": totals[key]} for key in dict.fromkeys(keys)]


def _make(keys: int, skew: float, indexes: Indexes, rng: np.random.Generator) -> dict[str, Any]:
    n = len(indexes)
    return {"key": _draw(keys, skew, rng.random(n)), "value": rng.integers(1, LARGEST_VALUE, n, endpoint=True)}


def _draw(keys: int, skew: float, uniform: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
    """Keys by Zipf's law, as the continuous density x^-skew over [1, keys + 1), rounded down.

    The exact law needs a table of all keys in every worker: 80 MB for ten million.
    """
    if skew == 1:
        ranks = (keys + 1) ** uniform
    else:
        power = 1 - skew
        ranks = (1 + uniform * ((keys + 1) ** power - 1)) ** (1 / power)
    return np.minimum(ranks.astype(np.int64), keys) - 1
