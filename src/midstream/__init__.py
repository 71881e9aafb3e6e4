"""midstream: change a running Spark stream without stopping it."""

from midstream.errors import MidstreamError
from midstream.flow.builder import Flow, Stream
from midstream.flow.sinks import ConsoleSink, FileSink, MemorySink, NoopSink
from midstream.flow.sources import Constant, GeneratorSource, ListSource, SquareWave, Step
from midstream.version import __version__

__all__ = [
    "ConsoleSink",
    "Constant",
    "FileSink",
    "Flow",
    "GeneratorSource",
    "ListSource",
    "MemorySink",
    "MidstreamError",
    "NoopSink",
    "SquareWave",
    "Step",
    "Stream",
    "__version__",
]
