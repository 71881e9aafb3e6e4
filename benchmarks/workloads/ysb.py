"""The Yahoo streaming benchmark: adverts are seen and clicked; count the views per campaign and ten seconds."""

from __future__ import annotations

import uuid
from collections import Counter
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cache, partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from midstream import Flow, GeneratorSource, agg, tumbling
from midstream.flow.schedules import Indexes, Schedule
from midstream.flow.sinks import SinkTarget

__all__ = ["COLUMNS", "LARGE", "SMALL", "Adverts", "flow", "oracle"]

COLUMNS = "user_id string, page_id string, ad_id string, ad_type string, event_type string, ip string"
"""Six of an event's seven columns. The source adds ``event_time``, when the event is due."""

AD_TYPES = pa.array(["banner", "modal", "sponsored-search", "mail", "mobile"])
EVENT_TYPES = pa.array(["view", "click", "purchase"])
DELAY_S, WINDOW_S = 1, 10


@dataclass(frozen=True)
class Adverts:
    """Who advertises with what, and who sees it; the same for the same seed.

    >>> [batch] = Adverts().events(rate=1000).rows(0, 2, start_us=0)
    >>> batch.num_columns, batch["event_time"].cast("int64").to_pylist()
    (7, [0, 1000])
    """

    campaigns: int = 100
    ads_per_campaign: int = 10
    users: int = 10_000
    pages: int = 100
    seed: int = 0

    def events(self, rate: Schedule | float, **options: Any) -> GeneratorSource:
        """The stream of events; another ``seed=`` gives other events about the same adverts."""
        return GeneratorSource(partial(_make, self), COLUMNS, rate, **options)

    def ads(self) -> pa.Table:
        """One row per advert: ``ad_id, campaign_id``."""
        campaign = np.repeat(np.arange(self.campaigns), self.ads_per_campaign)
        return pa.table(
            {
                "ad_id": self.ids("ad", self.campaigns * self.ads_per_campaign),
                "campaign_id": self.ids("campaign", self.campaigns).take(pa.array(campaign)),
            }
        )

    def ids(self, kind: str, count: int) -> pa.Array:
        """Random names, as UUIDs."""
        return _ids(self.seed, kind, count)


SMALL = Adverts(campaigns=5, ads_per_campaign=3, users=50, pages=5)
LARGE = Adverts()
"""A hundred campaigns of ten adverts, as in the benchmark."""


def flow(source: Any, sink: SinkTarget, adverts: Adverts = LARGE) -> Flow:
    """Counts go to ``sink``, once for each campaign and window that had a view, when the window has closed."""
    flow = Flow("ysb")
    (
        flow.source("events", source, delay=f"{DELAY_S} seconds")
        .filter_batches("views", is_view)
        .map_batches("project", project, returns="ad_id string, event_time timestamp")
        .lookup("campaign", adverts.ads(), on="ad_id")
        .key_by("by_campaign", "campaign_id")
        .aggregate("count", window=tumbling(f"{WINDOW_S} seconds"), views=agg.count())
        .sink("counts", sink)
    )
    return flow


def is_view(events: pa.RecordBatch) -> pa.Array:
    """Neither clicks nor purchases."""
    return pc.equal(events["event_type"], "view")


def project(events: pa.RecordBatch) -> pa.RecordBatch:
    """Only what is needed from here on."""
    return events.select(["ad_id", "event_time"])


def oracle(events: pa.Table, adverts: Adverts = LARGE) -> list[dict[str, Any]]:
    """Views per campaign and event_time // 10 s, of the windows that the last watermark closes; in any order."""
    campaign_of = dict(zip(*(column.to_pylist() for column in adverts.ads().columns), strict=True))
    moments = events["event_time"].cast(pa.int64()).to_pylist()
    kinds, ads = events["event_type"].to_pylist(), events["ad_id"].to_pylist()
    seconds = [us // 1_000_000 for us in moments]
    views = Counter(
        (campaign_of[ad], second // WINDOW_S * WINDOW_S)
        for ad, kind, second in zip(ads, kinds, seconds, strict=True)
        if kind == "view"
    )
    watermark = max(moments, default=0) / 1e6 - DELAY_S
    return [
        {
            "campaign_id": campaign,
            "window_start": datetime.fromtimestamp(start, UTC),
            "window_end": datetime.fromtimestamp(start, UTC) + timedelta(seconds=WINDOW_S),
            "views": count,
        }
        for (campaign, start), count in views.items()
        if start + WINDOW_S <= watermark
    ]


@cache
def _ids(seed: int, kind: str, count: int) -> pa.Array:
    rng = np.random.default_rng((seed, *kind.encode()))
    return pa.array([str(uuid.UUID(bytes=rng.bytes(16), version=4)) for _ in range(count)])


def _make(adverts: Adverts, indexes: Indexes, rng: np.random.Generator) -> dict[str, Any]:
    def any_of(values: pa.Array) -> pa.Array:
        return values.take(pa.array(rng.integers(0, len(values), len(indexes))))

    return {
        "user_id": any_of(adverts.ids("user", adverts.users)),
        "page_id": any_of(adverts.ids("page", adverts.pages)),
        "ad_id": any_of(adverts.ids("ad", adverts.campaigns * adverts.ads_per_campaign)),
        "ad_type": any_of(AD_TYPES),
        "event_type": any_of(EVENT_TYPES),
        "ip": any_of(_addresses()),
    }


@cache
def _addresses() -> pa.Array:
    return pa.array([f"192.0.2.{host}" for host in range(1, 255)])
