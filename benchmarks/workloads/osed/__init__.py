"""OSED, online social event detection: bursts of words in a stream of tweets, and the events behind them.

The flow of the MorphStream paper (8.6.1), over windows of 400 tweets. What the steps of a window share are tables, and
the order of the steps is one of timestamps, so that the whole of a step comes before any of the next:

=========  ===============================================================================================
windows    keeps tweets until their window is whole
count      one transaction per tweet: how often its words occur, now and before they began to burst
judge      one per tweet, once the window's words are counted; a word whose TF-IDF has grown is a keyword
gather     one per tweet with keywords: joins the cluster that is most like it (cosine), or founds one
select     one per such tweet, once all have joined: a cluster that grows is an event, told once per window
=========  ===============================================================================================

``count`` and ``judge`` see every tweet and are compiled. Clusters are Python objects, which only the few tweets with
keywords touch.
"""

from benchmarks.workloads.osed.detecting import flow
from benchmarks.workloads.osed.oracle import Detector, oracle
from benchmarks.workloads.osed.terms import COLUMNS, EVENTS, SIZE, TABLES
from benchmarks.workloads.osed.tweets import LARGE, SMALL, Talk, story_of

__all__ = ["COLUMNS", "EVENTS", "LARGE", "SIZE", "SMALL", "TABLES", "Detector", "Talk", "flow", "oracle", "story_of"]
