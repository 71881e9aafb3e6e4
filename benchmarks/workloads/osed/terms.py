"""What OSED's flow and its oracle both go by: sizes, thresholds, and the tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

COLUMNS = "tweet bigint, text string"
"""Tweets are numbered from 0; the source adds ``event_time``, when a tweet is due."""

EVENTS = "window bigint, cluster bigint, keyword string, popularity bigint, growth double"
"""``popularity``: tweets that joined the cluster in this window; ``growth``: against the window before."""

SIZE = 400  # tweets in a window
WORDS = 8  # of a tweet that count
KEYWORDS = 3  # of a tweet that lead to clusters
LEAST, GROWTH = 8, 4  # least number of tweets of a window with a keyword, and least growth of its TF-IDF
LIKE = 0.2  # cosine of a tweet and the cluster that it joins
KEEP = 5  # windows after which a cluster is forgotten that nobody joined
SLOTS = 256  # clusters that are remembered
ROOM = 200  # words of a cluster that are remembered, at least
POPULAR, GROWN = 10, 1.5  # tweets of a window that make a cluster an event, and how many times more than before

WORD_COLUMNS = tuple(f"w{j}" for j in range(WORDS))
KEY_COLUMNS = tuple(f"k{j}" for j in range(KEYWORDS))

COUNT, JUDGE, GATHER, SELECT = range(4)
STEPS = ("count", "judge", "gather", "select")
NOT_GROWN, TOLD, FEW = "does not grow", "told already", "too few tweets"

TABLES: Mapping[str, Mapping[str, Any]] = {
    "words": {
        "key": "string",
        "value": "window bigint, now bigint, base bigint, seen bigint",
        "default": {"window": -1, "now": 0, "base": 0, "seen": 0},
    },
    "leads": {"key": "string", "value": "bigint", "default": 0},
    "clusters": {
        "key": "bigint",
        "value": "id bigint, window bigint, now bigint, before bigint, told bigint",
        "default": {"id": 0, "window": -1, "now": 0, "before": 0, "told": -1},
    },
    "vectors": {"key": "bigint", "value": "object", "default": None},
    "founded": {"key": "bigint", "value": "bigint", "default": 0},
}
"""Words: tweets that have it in its newest window (``now``), in the one before it began to burst (``base``), and ever.

Leads: the cluster that a keyword leads to. A cluster has a number (``id``), of which the remainder is its place; its
vector is how often which word occurs in it, with the sum of the squares. Founded: how many there were, under key 0.
"""
