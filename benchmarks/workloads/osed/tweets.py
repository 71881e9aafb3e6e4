"""Tweets: words by Zipf's law, and stories that come and go, told in words of their own."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from benchmarks.workloads.osed.terms import COLUMNS, SIZE, WORDS
from midstream import GeneratorSource
from midstream.flow.schedules import Indexes, Schedule

__all__ = ["LARGE", "SMALL", "Talk", "story_of"]

RISE_AND_FALL = np.array([0.5, 1.0, 1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.4, 0.3, 0.3])
"""How much a story is talked about, window by window, as a share of its peak."""
OF_STORY = 4  # words of a tweet about a story that are the story's
STORY_WORDS = 6

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Talk:
    """What people tweet about. Story n begins in window ``first + n * every``; after ``stories`` they come again.

    >>> [batch] = SMALL.tweets(rate=1000).rows(0, 2, start_us=0)
    >>> batch["tweet"].to_pylist(), [len(text.split()) for text in batch["text"].to_pylist()]
    ([0, 1], [8, 8])
    """

    vocabulary: int = 20_000
    skew: float = 1.0
    """Exponent of Zipf's law."""
    stories: int = 200
    first: int = 2
    every: int = 10
    """Windows from the beginning of a story to that of the next; a story lasts twelve."""
    peak: int = 40
    """Tweets of a window that are about a story at its height, on average."""

    def tweets(self, rate: Schedule | float, **options: Any) -> GeneratorSource:
        """The stream of tweets, in order; another ``seed=`` gives other ones about the same stories."""
        return GeneratorSource(partial(_make, self), COLUMNS, rate, **options)


SMALL = Talk(vocabulary=2_000, skew=0.9)
LARGE = Talk()


def story_of(word: str) -> int | None:
    """The story that a word belongs to, or None if it is one that anybody uses.

    >>> story_of("s17_3"), story_of("w99")
    (17, None)
    """
    return int(word[1:].partition("_")[0]) if word.startswith("s") else None


def _make(talk: Talk, indexes: Indexes, rng: np.random.Generator) -> dict[str, Any]:
    n = len(indexes)
    words = np.minimum(np.searchsorted(_zipf(talk), rng.random((n, WORDS)), side="right"), talk.vocabulary - 1)
    story = _stories(talk, indexes // SIZE, rng.random(n))
    about = np.flatnonzero(story >= 0)
    own = rng.random((len(about), STORY_WORDS)).argsort(axis=1)[:, :OF_STORY]
    words[about, :OF_STORY] = talk.vocabulary + story[about, None] * STORY_WORDS + own
    columns = [_words(talk).take(pa.array(words[:, j])) for j in range(WORDS)]
    return {"tweet": indexes, "text": pc.binary_join_element_wise(*columns, " ")}


def _stories(talk: Talk, windows: Ints, uniform: npt.NDArray[np.float64]) -> Ints:
    """Which story each tweet is about, or -1."""
    story = np.full(len(windows), -1)
    taken = np.zeros(len(windows))
    newest = (windows - talk.first) // talk.every
    for back in range(-(-len(RISE_AND_FALL) // talk.every)):
        number = newest - back
        age = windows - talk.first - number * talk.every
        is_told = (number >= 0) & (age < len(RISE_AND_FALL))
        share = np.where(is_told, RISE_AND_FALL[np.minimum(age, len(RISE_AND_FALL) - 1)], 0.0) * talk.peak / SIZE
        chosen = (uniform >= taken) & (uniform < taken + share)
        story[chosen] = number[chosen] % talk.stories
        taken += share
    return story


@cache
def _zipf(talk: Talk) -> npt.NDArray[np.float64]:
    weights = np.arange(1, talk.vocabulary + 1) ** -talk.skew
    return np.asarray(np.cumsum(weights) / weights.sum())


@cache
def _words(talk: Talk) -> pa.Array:
    common = [f"w{rank}" for rank in range(talk.vocabulary)]
    return pa.array(common + [f"s{story}_{j}" for story in range(talk.stories) for j in range(STORY_WORDS)])
