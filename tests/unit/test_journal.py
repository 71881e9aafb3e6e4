"""The journal of a run: kept when it failed, and enough to replay every decision."""

from __future__ import annotations

import msgspec
import pytest
from typer.testing import CliRunner

from midstream.cli.app import app
from midstream.control.coordinator import Coordinator
from midstream.control.journal import Journal, read, replay, tell
from midstream.control.messages import (
    EpochOpened,
    EpochSealed,
    Event,
    Received,
    TaskFailed,
    TaskFailure,
    TaskFinished,
    TaskId,
    TaskStarted,
)
from midstream.errors import CheckpointError
from midstream.ids import Digest, Epoch, PartitionId, Revision, Run, StageIndex, WireId
from midstream.storage.documents import FORMAT
from midstream.version import __version__


def opened(epoch: int) -> EpochOpened:
    return EpochOpened(Epoch(epoch), Run(0), Revision(1), (Digest("ab"), Digest("cd")), {StageIndex(1): 2})


def task(stage: int, attempt: int) -> TaskId:
    return TaskId(Epoch(4), Run(0), StageIndex(stage), PartitionId(0), attempt)


EVENTS: list[Event] = [
    opened(4),
    Received(b"a", TaskStarted(task(0, 1))),
    Received(b"a", TaskFailed(task(0, 1), TaskFailure("score", "ValueError: no", "{'n': 1}", "line 3"))),
    Received(b"b", TaskStarted(task(0, 2))),
    Received(b"b", TaskFinished(task(0, 2), (), {}, {WireId(0): 5}, {WireId(0): 5})),
    Received(b"c", TaskStarted(task(1, 3))),
    Received(b"c", TaskFinished(task(1, 3), (), {WireId(0): 4}, {}, {})),
]


def kept(events: list[Event]) -> bytes:
    journal = Journal()
    for event in events:
        journal.append(event)
    return journal.to_bytes()


def test_a_journal_returns_its_events():
    assert read(kept(EVENTS)) == EVENTS


def test_a_replay_decides_as_the_coordinator_did():
    first = Coordinator()
    for event in EVENTS:
        first.handle(event)
    again = replay(read(kept(EVENTS)))
    assert again.story == first.story
    assert again.failures == first.failures
    seal = EpochSealed(Epoch(4), Run(0))
    assert again.handle(seal) == first.handle(seal)


def test_rows_of_users_are_not_recorded_and_decisions_are_the_same():
    finished = EVENTS[-1].message  # type: ignore[union-attr]
    with_rows = Received(b"c", msgspec.structs.replace(finished, samples={"score": b"ann's salary"}))
    data = kept([*EVENTS[:-1], with_rows])
    assert b"salary" not in data
    first = Coordinator()
    for event in [*EVENTS[:-1], with_rows]:
        first.handle(event)
    again = replay(read(data))
    assert (again.story, again.failures) == (first.story, first.failures)
    seal = EpochSealed(Epoch(4), Run(0))
    assert again.handle(seal) == first.handle(seal)


def test_a_new_run_starts_a_new_journal():
    assert read(kept([*EVENTS, opened(5)])) == [opened(5)]


def test_a_journal_is_shown_with_one_line_per_event():
    assert tell(EVENTS).splitlines()[2] == "TaskFailed(epoch 4.0 stage 0 partition 0 attempt 1)"
    assert len(tell(EVENTS).splitlines()) == len(EVENTS)


def test_a_file_that_is_not_a_journal_is_refused():
    for data in (b"something else", b"", b"\xff", msgspec.msgpack.encode([1, 2])):
        with pytest.raises(CheckpointError, match=r"not a journal that midstream .* can read"):
            read(data)


def test_a_journal_of_another_version_is_refused_with_its_version():
    file = msgspec.msgpack.decode(kept(EVENTS))
    assert (file["format"], file["version"]) == (FORMAT, __version__)
    with pytest.raises(CheckpointError, match=r"format 99 \(written by midstream 9.9\), which is newer"):
        read(msgspec.msgpack.encode(file | {"format": 99, "version": "9.9"}))
    with pytest.raises(CheckpointError, match=r"midstream 9\.9 wrote it: read it with that"):
        read(msgspec.msgpack.encode(file | {"version": "9.9", "events": [{"type": "EpochDreamt"}]}))


def test_the_command_line_shows_a_journal(tmp_path):
    file = tmp_path / "0000000004.0"
    file.write_bytes(kept(EVENTS))
    result = CliRunner().invoke(app, ["journal", str(file)])
    assert result.exit_code == 0
    assert result.stdout == tell(EVENTS) + "\n"
    file.write_bytes(b"\xff")
    assert CliRunner().invoke(app, ["journal", str(file)]).exit_code == 1
