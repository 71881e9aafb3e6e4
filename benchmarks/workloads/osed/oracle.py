"""OSED in plain Python, window by window, on dictionaries: what the flow must give."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from benchmarks.workloads.osed.terms import (
    GROWN,
    GROWTH,
    KEEP,
    KEYWORDS,
    LEAST,
    LIKE,
    POPULAR,
    ROOM,
    SIZE,
    SLOTS,
    WORDS,
)

__all__ = ["Detector", "oracle"]


def oracle(tweets: pa.Table) -> Detector:
    """What is found in the windows that are whole; tweets may come in any order."""
    rows = sorted(tweets.to_pylist(), key=lambda row: row["tweet"])
    detector = Detector()
    for start in range(0, len(rows) - SIZE + 1, SIZE):
        detector.window([row["text"] for row in rows[start : start + SIZE]])
    return detector


@dataclass
class Word:
    """How often a word occurs."""

    window: int = -1
    now: int = 0
    base: int = 0
    seen: int = 0


@dataclass
class Cluster:
    """Tweets about one thing."""

    id: int
    window: int = -1
    now: int = 0
    before: int = 0
    told: int = -1
    weights: Counter[str] = field(default_factory=Counter)


@dataclass
class Detector:
    """All that is known so far; ``events`` are the rows that the flow's sink gets."""

    windows: int = 0
    founded: int = 0
    words: dict[str, Word] = field(default_factory=dict)
    leads: dict[str, int] = field(default_factory=dict)
    clusters: dict[int, Cluster] = field(default_factory=dict)
    events: list[dict[str, Any]] = field(default_factory=list)

    def window(self, texts: Sequence[str]) -> None:
        """Go through one window of tweets, step by step."""
        split = [text.lower().split()[:WORDS] for text in texts]
        for words in split:
            for word in {*words, *([""] if len(words) < WORDS else [])}:
                self.count(word)
        found = [(words, keywords) for words in split if (keywords := self.keywords(words))]
        for words, keywords in found:
            self.gather(words, keywords)
        for _, keywords in found:
            self.select(keywords[0])
        self.windows += 1

    def count(self, text: str) -> None:
        """One more tweet has this word."""
        word = self.words.setdefault(text, Word())
        if word.window < self.windows:
            last = word.now if word.window == self.windows - 1 else 0
            is_burst = word.window > 0 and last >= LEAST and last >= GROWTH * (word.base + 1)
            if not is_burst:
                word.base = last
            word.window, word.now = self.windows, 0
        word.now += 1
        word.seen += 1

    def keywords(self, words: Sequence[str]) -> list[str]:
        """Those that burst, the one that has grown most first."""
        growth = {text: self.growth(self.words[text]) for text in words}
        return sorted((text for text in growth if growth[text] >= GROWTH), key=lambda text: -growth[text])[:KEYWORDS]

    def growth(self, word: Word) -> float:
        """How many times its TF-IDF has grown."""
        if self.windows == 0 or word.now < LEAST:
            return 0.0
        tweets = SIZE * self.windows
        now = word.now * math.log1p((tweets + SIZE) / (1 + word.seen))
        return now / ((word.base + 1) * math.log1p(tweets / (1 + word.seen - word.now)))

    def gather(self, words: Sequence[str], keywords: Sequence[str]) -> None:
        """A tweet joins the cluster that is most like it, or founds one."""
        best, most = None, LIKE
        for lead in (self.leads.get(keyword, 0) for keyword in keywords):
            cluster = self.clusters.get(lead % SLOTS)
            if cluster is None or cluster.id != lead or cluster.window < self.windows - KEEP:
                continue
            length = math.sqrt(sum(weight**2 for weight in cluster.weights.values()) * len(words))
            cosine = sum(cluster.weights[word] for word in words) / length
            if cosine > most:
                best, most = cluster, cosine
        if best is None:
            self.founded += 1
            best = self.clusters[self.founded % SLOTS] = Cluster(self.founded)
        if best.window < self.windows:
            best.before = best.now if best.window == self.windows - 1 else 0
            best.window, best.now = self.windows, 0
        best.now += 1
        best.weights.update(words)
        if len(best.weights) > ROOM:
            best.weights = Counter({word: weight for word, weight in best.weights.items() if weight > 1})
        self.leads.update(dict.fromkeys(keywords, best.id))

    def select(self, keyword: str) -> None:
        """Tell what a keyword leads to, if it is an event and not told yet."""
        cluster = self.clusters[self.leads[keyword] % SLOTS]
        growth = cluster.now / (cluster.before + 1)
        is_new = cluster.id == self.leads[keyword] and cluster.told < self.windows
        if is_new and cluster.now >= POPULAR and (growth >= GROWN or cluster.told >= 0):
            cluster.told = self.windows
            about = {"window": self.windows, "cluster": cluster.id, "keyword": keyword}
            self.events.append(about | {"popularity": cluster.now, "growth": growth})
