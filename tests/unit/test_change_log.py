"""The log of changes: entries are added and never altered; a torn last entry was never acknowledged."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from midstream.change.configuration import Configuration, first_configuration
from midstream.change.restart import drop_changes
from midstream.checkpoint.change_log import ChangeLog
from midstream.checkpoint.change_records import NOT_STORED, ChangeEvent, ChangeRecord, Outcome, UpdateRecord
from midstream.errors import CheckpointError
from midstream.flow.functions import pack
from midstream.ids import Revision
from midstream.storage.blobs import BlobStore
from midstream.storage.checksums import with_checksum, without_checksum
from midstream.storage.documents import FORMAT
from tests.power_loss import Recorder, Removed, Renamed, Synced
from tests.restarts import restored

APPLIED = Outcome.APPLIED


def record_of(number: int, outcome: Outcome = Outcome.PENDING) -> ChangeRecord:
    update = UpdateRecord("FM", "two", NOT_STORED, "", NOT_STORED)
    return ChangeRecord(number, Revision(number + 1), 0.0, "ann@host", "fries", (update,), "plan", outcome)


def kept(log: ChangeLog) -> list[tuple[int, str]]:
    return [(each.number, str(each.outcome)) for each in log.records()]


def entries(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def log(tmp_path: Path) -> ChangeLog:
    """A log of two changes, the first of which is applied: three entries."""
    made = ChangeLog(str(tmp_path))
    for record in (record_of(1), record_of(2), record_of(1, APPLIED)):
        made.keep(record)
    return made


def again(log: ChangeLog) -> ChangeLog:
    return ChangeLog(log.location)


def test_changes_are_numbered_by_request_and_the_last_entry_of_each_counts(tmp_path: Path) -> None:
    log = ChangeLog(str(tmp_path))
    for number in (1, 2):
        assert log.next_number() == number
        log.keep(record_of(number))
    log.keep(record_of(1, APPLIED))
    assert kept(log) == kept(again(log)) == [(1, "applied"), (2, "pending")]
    assert again(log).next_number() == log.next_number() == 3


def test_entries_are_on_disk_when_they_are_kept_and_are_never_altered(tmp_path: Path) -> None:
    recorder = Recorder()
    with recorder.recording():
        log = ChangeLog(str(tmp_path / "changes"))
        for record in (record_of(1), record_of(1, APPLIED), record_of(2)):
            log.keep(record)
            assert recorder.operations[-1] == Synced(str(tmp_path / "changes"), is_folder=True)
    names = [operation.other for operation in recorder.operations if isinstance(operation, Renamed)]
    assert names == [str(tmp_path / "changes" / f"{entry:010d}.json") for entry in (1, 2, 3)]
    assert not any(isinstance(operation, Removed) for operation in recorder.operations)


USES: dict[str, Callable[[ChangeLog], Any]] = {
    "secure": lambda log: log.secure(),
    "records": lambda log: log.records(),
    "next number": lambda log: log.next_number(),
    "keep": lambda log: log.keep(record_of(2)),
    "owe": lambda log: log.owe(record_of(2), lambda: None),
}


@pytest.mark.parametrize("use", USES)
def test_a_record_that_is_owed_gets_its_entry_before_the_log_is_used_again(tmp_path: Path, use: str) -> None:
    log, at_sync = ChangeLog(str(tmp_path)), []
    log.owe(record_of(1), lambda: at_sync.append(entries(tmp_path)))
    assert entries(tmp_path) == []
    USES[use](log)
    assert at_sync == [[]], "what the record refers to comes first"
    assert kept(again(log))[0] == (1, "pending")
    log.secure()
    assert len(at_sync) == 1


@pytest.mark.parametrize("use", USES)
def test_without_what_it_refers_to_a_record_has_no_entry_and_the_log_is_of_no_use(tmp_path: Path, use: str) -> None:
    def broken() -> None:
        raise CheckpointError("no disk")

    log = ChangeLog(str(tmp_path))
    log.owe(record_of(1), broken)
    for _ in range(2):
        with pytest.raises(CheckpointError, match="no disk"):
            USES[use](log)
    assert entries(tmp_path) == []


def test_a_reader_sees_what_a_writer_adds(log: ChangeLog) -> None:
    reader = again(log)
    assert kept(reader) == [(1, "applied"), (2, "pending")]
    log.keep(record_of(2, Outcome.ROLLED_BACK))
    log.keep(record_of(3))
    assert kept(reader) == [(1, "applied"), (2, "rolled back"), (3, "pending")]


def test_a_long_log_does_not_make_an_update_slow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = ChangeLog(str(tmp_path), durable=False)
    for number in range(1, 1001):
        log.keep(record_of(number))
    fresh = again(log)
    assert fresh.next_number() == 1001
    looks = []
    monkeypatch.setattr(fresh, "_entries", lambda: looks.append("list"))
    monkeypatch.setattr(fresh, "_decoded", lambda _: looks.append("read"))
    for number in range(1001, 1101):
        assert fresh.next_number() == number
        fresh.keep(record_of(number))
        fresh.keep(record_of(number, APPLIED))
    assert looks == []
    monkeypatch.undo()
    assert len(again(log).records()) == 1100


# ── damage ────────────────────────────────────────────────────────────────────────────────────────────────────────

TEARS = {
    "empty": lambda data: b"",
    "cut": lambda data: data[: len(data) // 2],
    "zeros": lambda data: bytes(len(data)),
    "flipped": lambda data: bytes([data[0] ^ 1]) + data[1:],
    "without its checksum": lambda data: data.rpartition(b"\n")[0],
}


def tear(log: ChangeLog, entry: int, how: str) -> None:
    path = Path(log.location) / f"{entry:010d}.json"
    path.write_bytes(TEARS[how](path.read_bytes()))


@pytest.mark.parametrize("how", TEARS)
def test_a_torn_last_entry_is_left_out_reported_and_set_aside_by_the_next(
    log: ChangeLog, tmp_path: Path, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    tear(log, 3, how)
    torn = (tmp_path / "0000000003.json").read_bytes()
    found = again(log)
    assert kept(found) == kept(found) == [(1, "pending"), (2, "pending")]
    [message] = [record.getMessage() for record in caplog.records]
    assert "the last entry" in message
    assert "0000000003.json" in message
    assert entries(tmp_path) == [f"{entry:010d}.json" for entry in (1, 2, 3)], "a reader changes nothing"
    found.keep(record_of(1, Outcome.ROLLED_BACK))
    assert (tmp_path / "0000000003.json.torn").read_bytes() == torn
    assert kept(again(log)) == kept(found) == [(1, "rolled back"), (2, "pending")]


def test_a_crash_after_a_torn_entry_was_set_aside_does_no_harm(log: ChangeLog, tmp_path: Path) -> None:
    tear(log, 3, "cut")
    (tmp_path / "0000000003.json").rename(tmp_path / "0000000003.json.torn")
    found = again(log)
    assert kept(found) == [(1, "pending"), (2, "pending")]
    found.keep(record_of(3))
    assert kept(again(log)) == [(1, "pending"), (2, "pending"), (3, "pending")]


@pytest.mark.parametrize("how", [*TEARS, "missing"])
@pytest.mark.parametrize("entry", [1, 2])
def test_damage_before_the_end_is_an_error_that_says_what_to_do(log: ChangeLog, how: str, entry: int) -> None:
    if how == "missing":
        (Path(log.location) / f"{entry:010d}.json").unlink()
    else:
        tear(log, entry, how)
    for call in (lambda: again(log).records(), lambda: again(log).next_number(), lambda: again(log).keep(record_of(9))):
        with pytest.raises(
            CheckpointError,
            match=rf"entry {entry} of the log of changes .*'000000000{entry}.json', is (damaged|missing)"
            r".*Restore it from a copy; or start the flow with changes='drop'",
        ):
            call()


@pytest.mark.parametrize("how", [*TEARS, "missing"])
@pytest.mark.parametrize("damaged", [(1,), (2,), (3,), (1, 2), (1, 2, 3)])
def test_damaged_entries_can_be_set_aside_and_whole_ones_stay(
    log: ChangeLog, tmp_path: Path, how: str, damaged: tuple[int, ...]
) -> None:
    held = {1: (1, "pending"), 2: (2, "pending"), 3: (1, "applied")}
    for entry in damaged:
        if how == "missing":
            (tmp_path / f"{entry:010d}.json").unlink()
        else:
            tear(log, entry, how)
    found = again(log)
    told = found.set_damage_aside()
    gone = [entry for entry in damaged if how != "missing" or entry < max({1, 2, 3} - set(damaged), default=0)]
    assert [int(message.split()[1]) for message in told] == gone
    whole = dict(held[entry] for entry in (1, 2, 3) if entry not in damaged)
    assert kept(found) == kept(again(log)) == sorted(whole.items())
    found.keep(record_of(7))
    assert kept(again(log))[-1] == (7, "pending")
    assert found.set_damage_aside() == []


# ── changes="drop" ────────────────────────────────────────────────────────────────────────────────────────────────


def one(row: dict[str, int]) -> dict[str, int]:
    return {"n": 1}


def two(row: dict[str, int]) -> dict[str, int]:
    return {"n": 2}


def script(store: BlobStore) -> Configuration:
    from midstream import Flow, ListSource, NoopSink

    flow = Flow("numbers")
    flow.source("in", ListSource([[]], "n bigint")).map("FM", one).sink("out", NoopSink())
    return first_configuration(flow.graph, store, 1)


@pytest.mark.parametrize("entry", [1, 2, 3, 4])
@pytest.mark.parametrize("how", [*TEARS, "missing"])
def test_after_drop_the_script_is_in_force_whatever_is_damaged(tmp_path: Path, entry: int, how: str) -> None:
    store, log = BlobStore(str(tmp_path / "blobs")), ChangeLog(str(tmp_path / "changes"))
    first = script(store)
    digest = store.put(pack(two, "FM"))
    for number in (1, 2):
        update = UpdateRecord("FM", "two", digest, "", first.blobs["FM"])
        record = msgspec.structs.replace(record_of(number), edits=(update,))
        log.keep(record)
        log.keep(msgspec.structs.replace(record, outcome=APPLIED))
    if how == "missing":
        (tmp_path / "changes" / f"{entry:010d}.json").unlink()
    else:
        tear(log, entry, how)
    found = again(log)
    found.set_damage_aside()
    drop_changes(first, found, Revision(3), by="ann", now=0.0)
    restart = restored(first, store, again(log), Revision(3))
    assert restart.configuration.blobs["FM"] == first.blobs["FM"]
    assert restart.pending is None
    assert restart.configuration.revision > 3


@pytest.mark.parametrize(
    ("extra", "says"),
    [
        ({"format": FORMAT + 1}, f"entry 2 of the log .* has format {FORMAT + 1}, which is newer"),
        ({"mood": "good"}, "entry 2 of the log .* cannot be read: unknown field 'mood'"),
        ({"edits": [{"operator": "FM"}]}, "entry 2 of the log .* cannot be read: .*missing required field"),
    ],
)
def test_an_entry_of_another_midstream_is_refused_and_stays(log: ChangeLog, extra: dict[str, Any], says: str) -> None:
    path = Path(log.location) / "0000000002.json"
    content = without_checksum(path.read_bytes())
    assert content is not None
    data = with_checksum(msgspec.json.encode(msgspec.json.decode(content) | extra))
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=says):
        again(log).records()
    assert path.read_bytes() == data


@pytest.mark.parametrize(
    ("events", "met"),
    [
        ([("told 2 running task(s)", None), ("switched", "a"), ("switched", "b"), ("reached", "c")], "met 2 running"),
        ([("told 0 running task(s)", None), ("reached", "c")], "came within an epoch, but no task"),
        ([("no epoch is running; the next one begins under it", None)], "fell between two epochs"),
        ([("waits for the next epoch", None), ("epoch 4 begins under it", None)], "took effect at the beginning"),
    ],
)
def test_a_record_shows_what_the_change_met(events, met):
    noted = tuple(ChangeEvent(1.0, what, task) for what, task in events)
    pending = msgspec.structs.replace(record_of(1), events=noted)
    assert pending.met is None, "not in effect yet"
    assert met in (msgspec.structs.replace(pending, delay_ms=1.0).met or "")
