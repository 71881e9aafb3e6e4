"""midstream: change a running Spark stream without stopping it.

Importing it loads neither Spark nor a web server: names that need them are loaded on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from midstream.engine.control_operations import ControlMessage, ControlOperation
from midstream.errors import MidstreamError
from midstream.flow import aggregations as agg
from midstream.flow.delta_sink import DeltaSink
from midstream.flow.delta_source import DeltaSource
from midstream.flow.edits import Divide, Insert, Move, Remove, Rescale, Rewire, Tune, Update
from midstream.flow.iceberg_sink import IcebergSink
from midstream.flow.kafka_notes import runs_that_count
from midstream.flow.kafka_sink import KafkaSink
from midstream.flow.schedules import Schedule
from midstream.flow.sinks import ConsoleSink, DatabaseSink, FileSink, MemorySink, NoopSink
from midstream.flow.sources import Constant, GeneratorSource, ListSource, SquareWave, Step
from midstream.flow.transactions import Table, transaction
from midstream.flow.transactions.tracing import Access
from midstream.flow.windows import sessions, sliding, tumbling
from midstream.operators.builder import Flow
from midstream.operators.stream import KeyedStream, Stream
from midstream.planner.assignment import Assignment
from midstream.state.handle import State
from midstream.version import __version__

if TYPE_CHECKING:
    from midstream.change.change import Change
    from midstream.change.forget import forget_state
    from midstream.change.fork import fork
    from midstream.change.migration import Migration
    from midstream.change.migration_goals import Drain, Rebalance
    from midstream.change.rewind import rewind
    from midstream.change.savepoint import delete_savepoint, savepoints, take_savepoint
    from midstream.checkpoint.change_records import Outcome
    from midstream.checkpoint.savepoints import Savepoint
    from midstream.checkpoint.sink_files import committed_files
    from midstream.controllers.auto_scale import AutoScale
    from midstream.controllers.balance import Balance
    from midstream.controllers.controller import Controller, Executors, Proposal
    from midstream.controllers.migrate import Migrate
    from midstream.controllers.pace import Pace
    from midstream.controllers.share import Share
    from midstream.controllers.situation import Situation
    from midstream.engine.control_context import ControlContext
    from midstream.observation import Observation
    from midstream.runtime.control_handle import ControlHandle
    from midstream.runtime.sharing import Sharing
    from midstream.runtime.spark.job import Job
    from midstream.runtime.spark.session import local_session

__all__ = [
    "Access",
    "Assignment",
    "AutoScale",
    "Balance",
    "Change",
    "ConsoleSink",
    "Constant",
    "ControlContext",
    "ControlHandle",
    "ControlMessage",
    "ControlOperation",
    "Controller",
    "DatabaseSink",
    "DeltaSink",
    "DeltaSource",
    "Divide",
    "Drain",
    "Executors",
    "FileSink",
    "Flow",
    "GeneratorSource",
    "IcebergSink",
    "Insert",
    "Job",
    "KafkaSink",
    "KeyedStream",
    "ListSource",
    "MemorySink",
    "MidstreamError",
    "Migrate",
    "Migration",
    "Move",
    "NoopSink",
    "Observation",
    "Outcome",
    "Pace",
    "Proposal",
    "Rebalance",
    "Remove",
    "Rescale",
    "Rewire",
    "Savepoint",
    "Schedule",
    "Share",
    "Sharing",
    "Situation",
    "SquareWave",
    "State",
    "Step",
    "Stream",
    "Table",
    "Tune",
    "Update",
    "__version__",
    "agg",
    "committed_files",
    "delete_savepoint",
    "forget_state",
    "fork",
    "local_session",
    "rewind",
    "runs_that_count",
    "savepoints",
    "sessions",
    "sliding",
    "take_savepoint",
    "transaction",
    "tumbling",
]

_LOADED_WHEN_USED = {
    "AutoScale": "midstream.controllers.auto_scale",
    "Balance": "midstream.controllers.balance",
    "Change": "midstream.change.change",
    "ControlContext": "midstream.engine.control_context",
    "ControlHandle": "midstream.runtime.control_handle",
    "Controller": "midstream.controllers.controller",
    "Drain": "midstream.change.migration_goals",
    "Executors": "midstream.controllers.controller",
    "Job": "midstream.runtime.spark.job",
    "Migrate": "midstream.controllers.migrate",
    "Migration": "midstream.change.migration",
    "Observation": "midstream.observation",
    "Outcome": "midstream.checkpoint.change_records",
    "Pace": "midstream.controllers.pace",
    "Proposal": "midstream.controllers.controller",
    "Rebalance": "midstream.change.migration_goals",
    "Savepoint": "midstream.checkpoint.savepoints",
    "Share": "midstream.controllers.share",
    "Sharing": "midstream.runtime.sharing",
    "Situation": "midstream.controllers.situation",
    "committed_files": "midstream.checkpoint.sink_files",
    "delete_savepoint": "midstream.change.savepoint",
    "forget_state": "midstream.change.forget",
    "fork": "midstream.change.fork",
    "local_session": "midstream.runtime.spark.session",
    "rewind": "midstream.change.rewind",
    "savepoints": "midstream.change.savepoint",
    "take_savepoint": "midstream.change.savepoint",
}

if not TYPE_CHECKING:  # otherwise type checkers would accept any attribute

    def __getattr__(name: str) -> Any:
        if name not in _LOADED_WHEN_USED:
            raise AttributeError(f"module 'midstream' has no attribute {name!r}")
        value = getattr(import_module(_LOADED_WHEN_USED[name]), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
