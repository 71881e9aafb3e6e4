"""Every error midstream raises, under one root.

::

    MidstreamError
    ├── FlowError (ValueError)          the description of the flow is wrong
    │   ├── SchemaError                 a column or a type is not what was declared
    │   ├── FunctionError               a function cannot be called or shipped
    │   └── SourceError                 a source cannot feed a stream
    ├── SetupError (RuntimeError)       Java, pyspark, a database or a session option is missing or unsuitable
    ├── CheckpointError (RuntimeError)  a checkpoint, or a sink's target, belongs to another job or is damaged
    ├── StateError (RuntimeError)       keyed state cannot be read, written or addressed
    ├── OperatorFailed (RuntimeError)   the user's code failed on a row, inside a task
    ├── ChangeFailed (RuntimeError)     a change of a running job was rolled back or refused
    ├── ControlFailed (RuntimeError)    a control operation failed, and nothing of it counts
    ├── JobFailed (RuntimeError)        the job stopped because an epoch could not be finished
    └── ControlError (RuntimeError)     coordinator and task could not communicate
        ├── ChannelError                a task could not reach the coordinator
        ├── Fenced                      this attempt is obsolete
        └── ProtocolError               an event that is not allowed in this state

A message says what was found, what was allowed and what to do. Errors cross process boundaries (Spark pickles them), so
all of them can be rebuilt from their message and a dictionary of fields.
"""

from __future__ import annotations

from typing import Any

__all__ = [
    "ChangeFailed",
    "ChannelError",
    "CheckpointError",
    "ControlError",
    "ControlFailed",
    "Fenced",
    "FlowError",
    "FunctionError",
    "JobFailed",
    "MidstreamError",
    "OperatorFailed",
    "ProtocolError",
    "SchemaError",
    "SetupError",
    "SourceError",
    "StateError",
]


class MidstreamError(Exception):
    """Root of all errors that midstream raises on purpose.

    Keyword arguments become attributes, and survive pickling:

    >>> import pickle
    >>> error = SchemaError("column 'p' is missing", column="p")
    >>> pickle.loads(pickle.dumps(error)).column
    'p'
    """

    def __init__(self, message: str, **fields: Any) -> None:
        super().__init__(message)
        self.message = message
        self.fields = fields

    def __getattr__(self, name: str) -> Any:
        # Reached only when normal lookup fails; `fields` itself is missing while unpickling.
        try:
            return self.__dict__["fields"][name]
        except KeyError:
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}") from None

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.message, self.fields)


def _rebuild(kind: type[MidstreamError], message: str, fields: dict[str, Any]) -> MidstreamError:
    return kind(message, **fields)


class FlowError(MidstreamError, ValueError):
    """The description of a flow is wrong; nothing was started."""


class SchemaError(FlowError):
    """A column or a type is not what was declared."""


class FunctionError(FlowError):
    """A function cannot be called with the arguments it will get, or cannot be shipped to workers."""


class SourceError(FlowError):
    """The object given as a source cannot feed a stream."""


class SetupError(MidstreamError, RuntimeError):
    """The machine, the Spark session or a database lacks something midstream needs."""


class CheckpointError(MidstreamError, RuntimeError):
    """A checkpoint, or the folder or table of a sink, belongs to another job, or is damaged."""


class StateError(MidstreamError, RuntimeError):
    """Keyed state cannot be read, written or addressed: a key or value that state cannot hold, or a damaged file."""


class OperatorFailed(MidstreamError, RuntimeError):
    """The user's code failed on a row.

    Fields: ``operator``, ``epoch``, ``partition``, ``row`` (a dict, or ``None`` if no single row is to blame) and
    ``user_traceback`` (the user's own frames only).
    """


class ChangeFailed(MidstreamError, RuntimeError):
    """A change was rolled back or refused. Fields: ``outcome``, ``revision``."""


class ControlFailed(MidstreamError, RuntimeError):
    """A control operation failed: a handler raised or took too long, or the job has ended. Fields: ``number``."""


class JobFailed(MidstreamError, RuntimeError):
    """The job stopped because an epoch could not be finished.

    Fields as in :class:`OperatorFailed` if the user's code was the cause, otherwise ``epoch`` and ``cause``.
    """


class ControlError(MidstreamError, RuntimeError):
    """Coordinator and task could not communicate."""


class ChannelError(ControlError):
    """A task could not reach the coordinator in time; Spark retries the task."""


class Fenced(ControlError):
    """This attempt belongs to a run that is over; its results are ignored."""


class ProtocolError(ControlError):
    """An event arrived that is not allowed in the coordinator's state; the message lists the events before it."""


def first_line(error: BaseException) -> str:
    """What an error of somebody else says in its first line.

    >>> first_line(OSError("disk full\\nat line 7")), first_line(KeyError())
    ('disk full', 'KeyError')
    """
    return str(error).strip().partition("\n")[0] or type(error).__name__
