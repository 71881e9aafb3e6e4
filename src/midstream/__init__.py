"""midstream: change a running Spark stream without stopping it."""

from midstream.errors import MidstreamError
from midstream.flow import aggregations as agg
from midstream.flow.edits import Update
from midstream.flow.sinks import ConsoleSink, DatabaseSink, FileSink, MemorySink, NoopSink
from midstream.flow.sources import Constant, GeneratorSource, ListSource, SquareWave, Step
from midstream.flow.transactions import Table, transaction
from midstream.flow.transactions.tracing import Access
from midstream.flow.windows import sessions, sliding, tumbling
from midstream.operators.builder import Flow
from midstream.operators.stream import KeyedStream, Stream
from midstream.state.handle import State
from midstream.version import __version__

__all__ = [
    "Access",
    "ConsoleSink",
    "Constant",
    "DatabaseSink",
    "FileSink",
    "Flow",
    "GeneratorSource",
    "KeyedStream",
    "ListSource",
    "MemorySink",
    "MidstreamError",
    "NoopSink",
    "SquareWave",
    "State",
    "Step",
    "Stream",
    "Table",
    "Update",
    "__version__",
    "agg",
    "sessions",
    "sliding",
    "transaction",
    "tumbling",
]
