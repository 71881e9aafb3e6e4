"""The journal: the events of a run, in the order in which the coordinator handled them.

The coordinator is pure, so its events determine all its decisions: replaying a journal reproduces the coordinator, step
by step, on any machine. The journal of a run that failed is kept in the checkpoint location.

The file is a msgpack map: the number of the format, the version of midstream that wrote it, and the events, each tagged
with its name.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from midstream.control.coordinator import Coordinator, line_of
from midstream.control.messages import EpochOpened, Event, FromRelay, Handled, Received, Said, TaskFinished
from midstream.errors import CheckpointError
from midstream.storage.documents import FORMAT, require_format
from midstream.version import __version__


class _File(msgspec.Struct):
    """The content of a file. Events are named after their classes, so only the version that wrote it can replay it."""

    format: int
    version: str
    events: msgspec.Raw


class Journal:
    """Events since the newest run was opened.

    >>> from midstream.control.messages import EpochAbandoned
    >>> from midstream.ids import Digest, Epoch, Revision, Run
    >>> journal = Journal()
    >>> journal.append(EpochOpened(Epoch(3), Run(0), Revision(1), (Digest("ab"),)))
    >>> journal.append(EpochAbandoned(Epoch(3), Run(0)))
    >>> print(tell(read(journal.to_bytes())))
    EpochOpened(epoch 3.0)
    EpochAbandoned(epoch 3.0)
    """

    def __init__(self) -> None:
        self._events: list[Event] = []

    def append(self, event: Event) -> None:
        """Add an event before it is handled. The opening of a run starts a new journal.

        Samples and results of control operations are left out: they are users' own, and no decision depends on them.
        """
        match event:
            case EpochOpened():
                self._events.clear()
            case Received(peer, TaskFinished(samples=samples, controls=controls) as report) if samples or controls:
                event = Received(peer, msgspec.structs.replace(report, samples={}, controls=()))
            case Received(peer, Handled() as handled):
                event = Received(peer, _without_result(handled))
            case Received(peer, FromRelay(said)):
                event = Received(peer, FromRelay(tuple(map(_said_without_result, said))))
        self._events.append(event)

    def to_bytes(self) -> bytes:
        """The journal as the content of a file."""
        events = msgspec.Raw(msgspec.msgpack.encode(self._events))
        return msgspec.msgpack.encode(_File(FORMAT, __version__, events))


def _without_result(handled: Handled) -> Handled:
    return Handled(handled.task, msgspec.structs.replace(handled.report, result=None))


def _said_without_result(said: Said) -> Said:
    if not isinstance(said.message, Handled):
        return said
    return msgspec.structs.replace(said, message=_without_result(said.message))


def read(data: bytes) -> list[Event]:
    """The events of a journal file."""
    version = "another version"
    try:
        file = msgspec.msgpack.decode(data, type=_File)
        require_format(file.format, "this journal", file.version)
        version = file.version
        return msgspec.msgpack.decode(file.events, type=list[Event])
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise CheckpointError(
            f"this is not a journal that midstream {__version__} can read: {error}. It is damaged, or midstream "
            f"{version} wrote it: read it with that"
        ) from error


def replay(events: Iterable[Event]) -> Coordinator:
    """A coordinator that has handled these events."""
    coordinator = Coordinator()
    for event in events:
        coordinator.handle(event)
    return coordinator


def tell(events: Iterable[Event]) -> str:
    """The story, one line per event."""
    return "\n".join(line_of(event) for event in events)
