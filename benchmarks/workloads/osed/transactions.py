"""OSED's transactions: ``count`` and ``judge`` on the words, ``gather`` and ``select`` on the clusters."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from benchmarks.workloads.osed.terms import (
    FEW,
    GROWN,
    GROWTH,
    KEEP,
    KEY_COLUMNS,
    LEAST,
    LIKE,
    NOT_GROWN,
    POPULAR,
    ROOM,
    SLOTS,
    TOLD,
    WORD_COLUMNS,
)
from midstream.txn import Table, Transaction, transaction

__all__ = ["COUNTS", "clustering", "trends"]

COUNTS = ("now", "base", "seen")
"""What ``judge`` tells of each word of a tweet."""

Row = dict[str, Any]
Vector = tuple[dict[str, int], int]


def trends(words: Table) -> tuple[Transaction, Transaction]:
    """What a tweet does to the words: they are counted, and later looked at."""

    @transaction
    def count(t: Any, e: Any) -> None:
        texts = [getattr(e, column) for column in WORD_COLUMNS]
        # All are read before any is written, so a word counts once, however often it is in a tweet.
        for text, word in zip(texts, [t.read(words, text) for text in texts], strict=True):
            is_open = word.window == e.window
            last = t.where(word.window == e.window - 1, word.now, 0)
            # A burst is measured against what was before it, as long as it lasts; in the first window nothing is one.
            bursts = (word.window > 0) & (last >= LEAST) & (last >= GROWTH * (word.base + 1))
            new = {
                "window": e.window,
                "now": t.where(is_open, word.now + 1, 1),
                "base": t.where(is_open | bursts, word.base, last),
                "seen": word.seen + 1,
            }
            t.write(words, text, new)

    @transaction
    def judge(t: Any, e: Any) -> Row:
        found = [t.read(words, getattr(e, column)) for column in WORD_COLUMNS]
        return {f"{name}{j}": getattr(word, name) for j, word in enumerate(found) for name in COUNTS}

    return count, judge


def clustering(leads: Table, clusters: Table, vectors: Table, founded: Table) -> tuple[Transaction, Transaction]:
    """What a tweet with keywords does to the clusters: it joins one, and later has it told if it is an event."""

    @transaction
    def gather(t: Any, e: Any) -> Row:
        number, best, cosine = t.read(founded, 0) + 1, 0, LIKE
        keys = [getattr(e, column) for column in KEY_COLUMNS]
        for lead in [t.read(leads, key) for key in keys]:
            cluster = t.read(clusters, t.key(lead % SLOTS))
            is_there = (lead > 0) & (cluster.id == lead) & (cluster.window >= e.window - KEEP)
            alike = t.call(likeness, t.read(vectors, t.key(lead % SLOTS)), e.words)
            is_better = is_there & (alike > cosine)
            best, cosine = t.where(is_better, lead, best), t.where(is_better, alike, cosine)
        joined = t.where(best > 0, best, number)
        place = t.key(joined % SLOTS)
        old, vector = t.read(clusters, place), t.read(vectors, place)
        is_old = old.id == joined
        is_open = is_old & (old.window == e.window)
        new = {
            "id": joined,
            "window": e.window,
            "now": t.where(is_open, old.now + 1, 1),
            "before": t.where(is_open, old.before, t.where(is_old & (old.window == e.window - 1), old.now, 0)),
            "told": t.where(is_old, old.told, -1),
        }
        t.write(founded, 0, t.max(joined, number - 1))
        t.write(clusters, place, new)
        t.write(vectors, place, t.call(merged, vector, is_old, e.words, returns="object"))
        for j, key in enumerate(keys):
            t.write(leads, key, t.where(e.keywords > j, joined, 0))
        return {"cluster": joined}

    @transaction
    def select(t: Any, e: Any) -> Row:
        lead = t.read(leads, e.k0)
        cluster = t.read(clusters, t.key(lead % SLOTS))
        growth = cluster.now / (cluster.before + 1)
        t.require(cluster.told < e.window, TOLD)
        t.require((cluster.id == lead) & (cluster.now >= POPULAR), FEW)
        t.require((growth >= GROWN) | (cluster.told >= 0), NOT_GROWN)  # what was an event once stays one
        told = {name: getattr(cluster, name) for name in ("id", "window", "now", "before")} | {"told": e.window}
        t.write(clusters, t.key(lead % SLOTS), told)
        return {"cluster": lead, "popularity": cluster.now, "growth": growth}

    return gather, select


def likeness(vector: Vector | None, words: Sequence[str]) -> float:
    """The cosine of a cluster and a tweet.

    >>> likeness(({"flood": 3, "river": 4}, 25), ["river"]), likeness(None, ["river"])
    (0.8, 0.0)
    """
    if vector is None:
        return 0.0
    weights, squares = vector
    return sum(weights.get(word, 0) for word in words) / math.sqrt(squares * len(words))


def merged(vector: Vector | None, is_old: bool, words: Sequence[str]) -> Vector:
    """The cluster with one more tweet. It begins anew unless it is old; words met once go when it gets crowded.

    >>> merged(({"flood": 1}, 1), True, ["flood", "river"])
    ({'flood': 2, 'river': 1}, 5)
    """
    weights, squares = (dict(vector[0]), vector[1]) if vector is not None and is_old else ({}, 0)
    for word in words:
        weight = weights.get(word, 0)
        weights[word] = weight + 1
        squares += 2 * weight + 1
    if len(weights) > ROOM:
        weights = {word: weight for word, weight in weights.items() if weight > 1}
        squares = sum(weight * weight for weight in weights.values())
    return weights, squares
