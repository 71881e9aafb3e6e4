"""NEXMark: an auction house. Three streams (people join, auctions open, bids come in) and nine queries over them."""

from benchmarks.workloads.nexmark.generator import LARGE, SMALL, House, Streams
from benchmarks.workloads.nexmark.oracle import latest, oracle
from benchmarks.workloads.nexmark.queries import QUERIES, UPDATES, flow

__all__ = ["LARGE", "QUERIES", "SMALL", "UPDATES", "House", "Streams", "flow", "latest", "oracle"]
