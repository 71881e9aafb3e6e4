"""OSED's flow: the transactions, and the plain operators between them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from benchmarks.workloads.osed.terms import (
    COUNT,
    EVENTS,
    GATHER,
    GROWTH,
    JUDGE,
    KEY_COLUMNS,
    KEYWORDS,
    LEAST,
    SELECT,
    SIZE,
    STEPS,
    TABLES,
    WORD_COLUMNS,
    WORDS,
)
from benchmarks.workloads.osed.transactions import COUNTS, clustering, trends
from midstream import Flow
from midstream.flow.sinks import SinkTarget

__all__ = ["GATHERED", "SPLIT", "counted_and_judged", "flow", "gathered_and_selected", "told"]

Matrix = npt.NDArray[Any]

_STEP = "kind string, at bigint, window bigint"
SPLIT = ", ".join([_STEP, *(f"{column} string" for column in WORD_COLUMNS)])
GATHERED = ", ".join([_STEP, "words array<string>", "keywords bigint", *(f"{column} string" for column in KEY_COLUMNS)])


def flow(source: Any, sink: SinkTarget) -> Flow:
    """Events go to ``sink``: each in every window in which it is one, when the window's last tweet has come."""
    flow = Flow("osed")
    words, *others = (flow.table(name, **what) for name, what in TABLES.items())
    (
        flow.source("tweets", source)
        .map_batches("number", with_window, returns="window bigint, tweet bigint, text string")
        .key_by("by window", "window")
        .process_batches("windows", whole_windows)
        .flat_map_batches("split", counted_and_judged, returns=SPLIT)
        .transact("trends", *trends(words), order_by="at", which="kind")
        .flat_map_batches("keywords", gathered_and_selected, returns=GATHERED)
        .transact("detect", *clustering(*others), order_by="at", which="kind")
        .filter_batches("told", is_told)
        .map_batches("tell", told, returns=EVENTS)
        .sink("events", sink)
    )
    return flow


def with_window(tweets: pa.RecordBatch) -> pa.RecordBatch:
    """Number the window of each tweet."""
    return pa.record_batch(
        {"window": pc.divide(tweets["tweet"], SIZE), "tweet": tweets["tweet"], "text": tweets["text"]}
    )


def whole_windows(keys: Any, tweets: pa.RecordBatch, state: Any) -> pa.RecordBatch:
    """Hold tweets back until their window is whole. Windows get whole one after the other, because tweets do."""
    order = np.argsort(keys.group_of_row, kind="stable")
    ends = np.cumsum(np.bincount(keys.group_of_row, minlength=len(keys)))
    whole = []
    for group, rows in enumerate(np.split(order, ends[:-1])):
        held = [*(state[group].get() or []), tweets.take(pa.array(rows))]
        if sum(len(part) for part in held) < SIZE:
            state[group].set(held)
        else:
            state[group].delete()
            whole += held
    return pa.concat_batches(whole) if whole else tweets.slice(0, 0)


def counted_and_judged(tweets: pa.RecordBatch) -> pa.RecordBatch:
    """Each tweet comes twice, to be counted and to be judged, as one column per word; short ones end in empty words."""
    if not len(tweets):
        return _steps(COUNT, tweets["window"], tweets["tweet"], dict.fromkeys(WORD_COLUMNS, tweets["text"]))
    words = pc.utf8_split_whitespace(pc.utf8_lower(pc.utf8_trim_whitespace(tweets["text"])))
    flat = pc.list_flatten(pc.list_slice(words, 0, WORDS, return_fixed_size_list=True)).fill_null("")
    places = np.arange(len(tweets)) * WORDS
    columns = {column: flat.take(pa.array(places + j)) for j, column in enumerate(WORD_COLUMNS)}
    return _steps(COUNT, tweets["window"], tweets["tweet"], columns)


def gathered_and_selected(judged: pa.RecordBatch) -> pa.RecordBatch:
    """Of the judged tweets, each that has keywords comes twice again, with the strongest of them."""
    judged = judged.filter(pc.equal(judged["kind"], STEPS[JUDGE]))
    growth = _growth(
        judged["window"].to_numpy(), *(_matrix(judged, [f"{name}{j}" for j in range(WORDS)]) for name in COUNTS)
    )
    growth[_matrix(judged, WORD_COLUMNS) == ""] = 0.0
    rows = np.flatnonzero((growth >= GROWTH).any(axis=1))
    strongest = np.argsort(-growth[rows], axis=1, kind="stable")
    texts = list(zip(*(judged[column].take(pa.array(rows)).to_pylist() for column in WORD_COLUMNS), strict=True))
    keywords = [
        list(dict.fromkeys(words[j] for j in order if grown[j] >= GROWTH))[:KEYWORDS]
        for words, order, grown in zip(texts, strongest.tolist(), growth[rows].tolist(), strict=True)
    ]
    columns = {
        "words": pa.array([[word for word in words if word] for words in texts], pa.list_(pa.string())),
        "keywords": pa.array([len(found) for found in keywords], pa.int64()),
    }
    for j, column in enumerate(KEY_COLUMNS):
        columns[column] = pa.array([found[j] if j < len(found) else "" for found in keywords], pa.string())
    return _steps(GATHER, judged["window"].take(pa.array(rows)), judged["at"].take(pa.array(rows)), columns)


def _steps(first: int, window: pa.Array, tweet: pa.Array, columns: Mapping[str, pa.Array]) -> pa.RecordBatch:
    """Rows that come twice, for one step and for the next; ``tweet`` may be any number that has the tweet's place."""
    windows = window.to_numpy()
    places = windows * (len(STEPS) * SIZE) + tweet.to_numpy() % SIZE
    both = pa.table(
        {
            "kind": pa.array(np.repeat([STEPS[first], STEPS[first + 1]], len(windows)), pa.string()),
            "at": np.concatenate([places + first * SIZE, places + (first + 1) * SIZE]),
            "window": np.concatenate([windows, windows]),
        }
        | {name: pa.concat_arrays([column, column]) for name, column in columns.items()}
    )
    return both.to_batches()[0] if len(both) else pa.RecordBatch.from_pylist([], both.schema)


def _matrix(rows: pa.RecordBatch, columns: Iterable[str]) -> Matrix:
    return np.column_stack([rows[column].to_numpy(zero_copy_only=False) for column in columns])


def _growth(window: Matrix, now: Matrix, base: Matrix, seen: Matrix) -> Matrix:
    """How many times the TF-IDF of words has grown; 0 for what is too rare, and for the first window."""
    tweets = SIZE * window[:, None]
    rarity, was = np.log1p((tweets + SIZE) / (1 + seen)), np.log1p(tweets / (1 + seen - now))
    with np.errstate(all="ignore"):  # before the first window there were no tweets
        grown = now * rarity / ((base + 1) * was)
    return np.where((now >= LEAST) & (window[:, None] > 0), grown, 0.0)


def is_told(selected: pa.RecordBatch) -> pa.Array:
    """Only what is an event."""
    return pc.and_(selected["committed"], pc.equal(selected["kind"], STEPS[SELECT]))


def told(selected: pa.RecordBatch) -> pa.RecordBatch:
    """Events as people want them."""
    names = {"window": "window", "cluster": "cluster", "keyword": "k0", "popularity": "popularity", "growth": "growth"}
    return pa.record_batch({name: selected[column] for name, column in names.items()})
