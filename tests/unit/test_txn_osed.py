"""OSED: the flow's steps match the oracle, and the oracle finds the stories that were planted."""

from __future__ import annotations

from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from benchmarks.workloads import osed
from benchmarks.workloads.osed import detecting, terms, transactions
from midstream import ListSource, MemorySink
from midstream.checkpoint.inspection import read_state
from midstream.testing import Faults, run_local
from midstream.txn import Batch, Engine, MemoryTables, Program, Table

WINDOWS = 26
TABLES = {name: Table(name, **what) for name, what in osed.TABLES.items()}


def tweets(windows: int = WINDOWS, talk: osed.Talk = osed.SMALL, **options: Any) -> pa.Table:
    return pa.Table.from_batches(talk.tweets(1000, **options).rows(0, windows * osed.SIZE, start_us=0))


def about(text: str) -> set[int]:
    """The stories that a tweet is about."""
    return {story for word in text.split() if (story := osed.story_of(word)) is not None}


def when_and_what(event: dict[str, Any]) -> tuple[int, int]:
    return event["window"], event["cluster"]


class Steps:
    """The flow run by hand: its functions and transactions, on batches of whole windows."""

    def __init__(self) -> None:
        words, *others = TABLES.values()
        steps = {"kind": "string", "at": "bigint", "window": "bigint"}
        split = steps | dict.fromkeys(terms.WORD_COLUMNS, "string")
        gathered = steps | {"words": "object", "keywords": "bigint"} | dict.fromkeys(terms.KEY_COLUMNS, "string")
        self.trends = Engine(Program.of(*(one.trace(split) for one in transactions.trends(words))), threads=1)
        self.clusters = Engine(
            Program.of(*(one.trace(gathered) for one in transactions.clustering(*others))), threads=1
        )
        self.memory = MemoryTables()
        self.events: list[dict[str, Any]] = []

    def take(self, batch: pa.RecordBatch) -> None:
        judged = self.transact(self.trends, detecting.counted_and_judged(detecting.with_window(batch)))
        selected = self.transact(self.clusters, detecting.gathered_and_selected(judged))
        self.events += detecting.told(selected.filter(detecting.is_told(selected))).to_pylist()

    def transact(self, engine: Engine, events: pa.RecordBatch) -> pa.RecordBatch:
        """Like the operator: outcomes after the events' columns. Events may arrive in any order."""
        events = events.take(pa.array(np.random.default_rng(5).permutation(len(events))))
        names = [kind.name for kind in engine.program.types]
        kinds = [names.index(kind) for kind in events["kind"].to_pylist()]
        result = engine.execute(Batch.of(events, order_by="at", kinds=kinds), self.memory)
        self.memory.apply(result, engine.program.tables)
        for name, column in result.returned.items():
            events = events.append_column(name, pa.array(column))
        order = np.argsort(events["at"].to_numpy())  # so that events can be compared in order
        return events.append_column("committed", pa.array(result.committed)).take(pa.array(order))

    def table(self, name: str) -> dict[Any, Any]:
        held = self.memory.as_dict(TABLES[name])
        return {key: value if len(value) > 1 else value[0] for key, value in held.items()}


@pytest.mark.long  # kernels are compiled when they are first used
@pytest.mark.parametrize("talk", [osed.SMALL, osed.LARGE], ids=["small", "large"])
def test_the_steps_match_the_oracle(talk: osed.Talk) -> None:
    said = tweets(talk=talk)
    steps, expected = Steps(), osed.oracle(said)
    for windows in (1, 2, 10, WINDOWS - 13):  # a batch is any number of whole windows
        size = windows * osed.SIZE
        steps.take(said.slice(0, size).combine_chunks().to_batches()[0])
        said = said.slice(size)
    assert len(expected.events) > 20
    assert [{**row, "growth": pytest.approx(row["growth"])} for row in expected.events] == steps.events
    assert steps.table("words") == {
        text: (word.window, word.now, word.base, word.seen) for text, word in expected.words.items()
    }
    assert {key: lead for key, lead in steps.table("leads").items() if key} == expected.leads
    assert steps.table("clusters") == {
        place: (one.id, one.window, one.now, one.before, one.told) for place, one in expected.clusters.items()
    }
    vectors = {place: dict(one.weights) for place, one in expected.clusters.items()}
    assert {place: weights for place, (weights, _) in steps.table("vectors").items()} == vectors
    assert steps.table("founded") == {0: expected.founded}


@pytest.mark.long
def test_the_flow_agrees_with_the_oracle(tmp_path: Path) -> None:
    said = tweets(8).select(["tweet", "text"])
    # Epochs end within windows, and the last window is incomplete.
    source = ListSource.of(said.to_pylist()[:-7], schema=osed.COLUMNS, epoch_rows=900, partitions=2)
    out, expected = MemorySink(), osed.oracle(said.slice(0, len(said) - 7))
    run_local(osed.flow(source, out), seed=1, faults=Faults(crash=0.02, repeat=0.05), checkpoint=str(tmp_path))
    assert (expected.windows, len(expected.events) >= 5) == (7, True)
    told = [{**row, "growth": pytest.approx(row["growth"])} for row in expected.events]
    assert sorted(out.rows, key=when_and_what) == sorted(told, key=when_and_what)
    words = {row.pop("key"): tuple(row.values()) for row in read_state(str(tmp_path), "words").to_pylist()}
    assert words == {text: (word.window, word.now, word.base, word.seen) for text, word in expected.words.items()}
    [held] = read_state(str(tmp_path), "windows").to_pylist()
    assert held["window"] == 7, "only the incomplete window is kept"


@pytest.mark.parametrize("talk", [osed.SMALL, osed.LARGE], ids=["small", "large"])
def test_every_story_is_found_once_and_followed(talk: osed.Talk) -> None:
    said, truth = tweets(talk=talk), defaultdict[int, Counter[int]](Counter)
    for row in said.to_pylist():
        for story in about(row["text"]):
            truth[story][row["tweet"] // osed.SIZE] += 1
    found = defaultdict[int, dict[int, dict[str, Any]]](dict)
    for event in osed.oracle(said).events:
        planted = osed.story_of(event["keyword"])
        found[-1 if planted is None else planted][event["window"]] = event
    assert set(truth) == set(found) - {-1} == {0, 1, 2}
    assert len(found[-1]) <= 3, "events that were not planted"
    for story, popularity in truth.items():
        assert len({event["cluster"] for event in found[story].values()}) == 1
        assert min(found[story]) == min(popularity), "it is found in its first window"
        for window, count in popularity.items():
            if count >= 15:
                assert found[story][window]["popularity"] == pytest.approx(count, rel=0.1)


def test_nothing_is_found_where_there_is_no_story() -> None:
    quiet = osed.Talk(vocabulary=2_000, skew=0.9, peak=0)
    assert len(osed.oracle(tweets(talk=quiet)).events) <= 4


def test_a_window_is_complete_when_its_last_tweet_arrives() -> None:
    said = tweets(4)
    assert osed.oracle(said).events != osed.oracle(said.slice(0, len(said) - 1)).events
    assert osed.oracle(said.slice(0, len(said) - 1)).windows == 3


def test_short_and_long_tweets_have_the_same_number_of_columns() -> None:
    texts = ["Flood", "", "a b c d e f g h i", " River  flood "]
    split = detecting.counted_and_judged(
        detecting.with_window(pa.record_batch({"tweet": [0, 1, 2, 400], "text": texts}))
    )
    assert split["kind"].to_pylist() == ["count"] * 4 + ["judge"] * 4
    assert split["at"].to_pylist() == [0, 1, 2, 1600, 400, 401, 402, 2000]
    assert [split[column].to_pylist()[:4] for column in ("w0", "w1", "w7")] == [
        ["flood", "", "a", "river"],
        ["", "", "b", "flood"],
        ["", "", "h", ""],
    ]


def test_words_follow_zipfs_law_and_stories_their_curve() -> None:
    words = Counter(word for text in tweets(10, osed.LARGE)["text"].to_pylist() for word in text.split())
    assert words["w0"] == pytest.approx(2 * words["w1"], rel=0.1)
    assert words["w0"] == pytest.approx(10 * words["w9"], rel=0.2)
    loud = osed.Talk(peak=200, every=20, vocabulary=1_000)
    told = Counter(row["tweet"] // osed.SIZE for row in tweets(14, loud).to_pylist() if about(row["text"]))
    assert [told[window] > 0 for window in range(15)] == [False] * 2 + [True] * 12 + [False]
    assert told[3] == pytest.approx(200, abs=30)
    assert told[2] == pytest.approx(100, abs=30)
    assert not tweets(1, seed=5).equals(tweets(1, seed=6))
