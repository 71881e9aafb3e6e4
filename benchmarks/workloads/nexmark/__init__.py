"""NEXMark: an auction house. Three streams (people join, auctions open, bids come in) and queries over them."""

from benchmarks.workloads.nexmark.catalogue import PARTED_BY, QUERIES, UPDATES, flow
from benchmarks.workloads.nexmark.generator import LARGE, SMALL, House, Streams
from benchmarks.workloads.nexmark.oracle import latest, oracle

__all__ = ["LARGE", "PARTED_BY", "QUERIES", "SMALL", "UPDATES", "House", "Streams", "flow", "latest", "oracle"]
