"""The base: a cache of committed state that is always correct or empty."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import lmdb
import pytest

from midstream.errors import CheckpointError, StateError
from midstream.ids import BinId, Epoch, PartitionId, Run
from midstream.state import base as base_module
from midstream.state import mapped
from midstream.state import marks as marks_module
from midstream.state import view as view_module
from midstream.state.base import Base
from midstream.state.files import Author, FileKind, StateFiles, table_of
from midstream.state.keys import Namespace
from midstream.state.lineage import EMPTY, Lineage

BINS = (BinId(0), BinId(7), BinId(255))
OWNER = "job 1, count"


class History:
    """Committed epochs, and the state after each."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files = StateFiles(str(folder / "checkpoint"))
        self.lineages: list[Lineage] = []
        self.truths: list[dict[bytes, bytes]] = []

    def commit(self, changes: dict[bytes, bytes | None], partition: int = 0) -> None:
        before = self.lineages[-1] if self.lineages else Lineage.start("count")
        truth = dict(self.truths[-1]) if self.truths else {}
        author = Author("count", Epoch(before.epoch + 1), Run(0), PartitionId(partition), 0)
        keys = sorted(changes)
        delta = self.files.write(table_of(keys, [changes[key] for key in keys]), FileKind.DELTA, author)
        self.lineages.append(before.after(author.epoch, [delta]))
        for key, value in changes.items():
            truth.pop(key, None)
            if value is not None:
                truth[key] = value
        self.truths.append(truth)

    def commit_many(self, epochs: int, keys: int = 50, size: int = 100) -> None:
        for epoch in range(epochs):
            changes: dict[bytes, bytes | None] = {
                bytes([number, 0]) + b"%d" % key: b"%d" % epoch * size
                for number in BINS
                for key in range(epoch, epoch + keys)
            }
            changes.update({bytes([number, 0]) + b"%d" % (epoch - 1): None for number in BINS})
            self.commit(changes)

    def base(self, owner: str = OWNER) -> Base:
        return Base(str(self.folder / "base"), owner, self.files)

    def check(self, base: Base, epoch: int = -1) -> None:
        assert contents(base, self.lineages[epoch]) == self.truths[epoch]


def contents(base: Base, lineage: Lineage) -> dict[bytes, bytes]:
    with base.view(lineage, BINS) as view:
        rows = view.table(BINS)
        return dict(zip(rows["key"].to_pylist(), rows["value"].to_pylist(), strict=True))


@pytest.fixture(autouse=True)
def small_environments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mapped, "FIRST_SIZE", 1 << 20)


@pytest.fixture
def history(tmp_path: Path) -> History:
    made = History(tmp_path)
    made.commit({b"\x00\x00a": b"1", b"\x07\x00a": b"1", b"\xff\x00a": b"1"})
    made.commit({b"\x00\x00a": b"2", b"\x07\x00a": None, b"\x07\x03t": b""})
    return made


@pytest.fixture
def base(history: History) -> Iterator[Base]:
    opened = history.base()
    yield opened
    opened.close()


def data_file(history: History) -> Path:
    (path,) = (history.folder / "base").glob("*/data.mdb")
    return path


# Normal use


def test_catching_up_happens_once(history, base):
    assert base.catch_up(history.lineages[0], BINS) == 3
    assert base.catch_up(history.lineages[0], BINS) == 0
    assert base.catch_up(history.lineages[1], BINS) == 3
    history.check(base)


def test_only_requested_bins_are_caught_up(history, base):
    assert base.catch_up(history.lineages[1], [BinId(7)]) == 3
    assert base.positions() == {7: history.lineages[1].position(BinId(7))}


def test_a_base_survives_its_process(history):
    first = history.base()
    first.catch_up(history.lineages[-1], BINS)
    first.close()
    second = history.base()
    assert second.catch_up(history.lineages[-1], BINS) == 0
    history.check(second)
    second.close()


def test_reads_return_values_in_the_order_of_the_keys(history, base):
    with base.view(history.lineages[-1], BINS) as view:
        asked = [b"\xff\x00a", b"\x07\x00a", b"\x00\x00a", b"\x00\x00a"]
        assert view.get_many(asked) == [b"1", None, b"2", b"2"]
        assert view.get_many([]) == []
        assert view.count(BinId(7)) == 1
        assert view.count(BinId(8)) == 0


@pytest.mark.parametrize("size", [view_module._CHUNK - 1, view_module._CHUNK, view_module._CHUNK + 1])
def test_a_scan_continues_across_chunks(history, base, size):
    history.commit({b"\x07\x03%06d" % number: b"%d" % number for number in range(size)})
    with base.view(history.lineages[-1], BINS) as view:
        found = list(view.scan(BinId(7), Namespace.EVENT_TIMER, b"0", b"1"))
        assert found == [(b"\x07\x03%06d" % number, b"%d" % number) for number in range(size)]
        assert list(view.scan(BinId(7), Namespace.EVENT_TIMER, b"000005", b"000007")) == found[5:7]
        assert list(view.scan(BinId(255), Namespace.VALUE)) == [(b"\xff\x00a", b"1")]


def test_a_view_does_not_see_changes_to_the_base(history, base):
    with base.view(history.lineages[0], BINS) as view:
        base.catch_up(history.lineages[1], BINS)
        assert view.get_many([b"\x00\x00a", b"\x07\x00a"]) == [b"1", b"1"]
    with pytest.raises(StateError, match="is closed"):
        view.get_many([b"\x00\x00a"])


def test_a_view_survives_growth_of_the_base(history, base):
    with base.view(history.lineages[-1], BINS) as view:
        big = History(history.folder / "other")
        big.commit_many(3, keys=400, size=4000)
        remapped = base._mapped.remapped
        other_bins = [BinId(7)]
        base.files, files = big.files, base.files
        base.catch_up(big.lineages[-1], other_bins)
        base.files = files
        assert base._mapped.remapped > remapped
        assert view.get_many([b"\x00\x00a"]) == [b"2"]
        assert view.get_many([b"\x07\x03t"]) == [b""]  # moved to another epoch in between, and back


def test_a_process_has_one_base_per_folder(history):
    folder = str(history.folder / "base")
    first = Base.shared(folder, OWNER, history.files)
    assert Base.shared(folder, OWNER, history.files) is first
    other = Base.shared(folder, "job 2, count", history.files)
    assert other is not first
    assert other.positions() == {}
    other.close()
    with pytest.raises(StateError, match="already open in this process"):
        [history.base(), history.base()]


def test_threads_can_read_while_another_grows_the_base(history, base):
    history.commit_many(8, keys=200, size=2000)
    ready, wrong = threading.Barrier(4), []

    def read(epoch: int) -> None:
        key = bytes([BINS[epoch], 0]) + b"a"
        with base.view(history.lineages[1], [BINS[epoch]]) as view:
            ready.wait()
            for _ in range(200):
                if view.get_many([key]) != [history.truths[1].get(key)]:
                    wrong.append(key)

    threads = [threading.Thread(target=read, args=(index,)) for index in range(3)]
    for thread in threads:
        thread.start()
    ready.wait()
    remapped = base._mapped.remapped
    for lineage in history.lineages[2:]:
        base.catch_up(lineage, [BinId(9)])
        with base._mapped.guarded():
            base._mapped._grow(0)
    for thread in threads:
        thread.join()
    assert not wrong
    assert base._mapped.remapped > remapped


# Distrust


def test_another_owner_gets_an_empty_base(history, base):
    base.catch_up(history.lineages[-1], BINS)
    base.close()
    other = history.base(owner="job 2, count")
    assert other.positions() == {}
    other.close()


def test_a_base_is_discarded_after_a_machine_crash(history, base, monkeypatch):
    base.catch_up(history.lineages[-1], BINS)
    base.close()
    monkeypatch.setattr(mapped, "boot_id", lambda: "the next boot")
    after = history.base()
    assert after.positions() == {}
    history.check(after)
    after.close()


def test_without_a_boot_id_everything_is_flushed(history, monkeypatch):
    monkeypatch.setattr(mapped, "boot_id", lambda: None)
    first = history.base()
    history.check(first)
    assert first._mapped._env is not None
    assert first._mapped._env.flags()["sync"]
    first.close()
    second = history.base()
    assert second.catch_up(history.lineages[-1], BINS) == 0
    second.close()


@pytest.mark.parametrize("size", [0, 1, 4096, 8192, 100_000, (1 << 20) - 1])
def test_a_truncated_file_is_replaced(history, base, size):
    history.check(base)
    base.close()
    os.truncate(data_file(history), size)
    again = history.base()
    assert again.positions() == {}  # even if only unused space was cut off
    history.check(again)
    again.close()


@pytest.mark.parametrize("garbage", [bytes(8192), b"\xff" * 8192, b"not a database" * 600])
def test_a_file_with_a_wrong_header_is_replaced(history, base, garbage):
    history.check(base)
    base.close()
    with data_file(history).open("r+b") as file:
        file.write(garbage)
    again = history.base()
    history.check(again)
    again.close()


@pytest.mark.parametrize("text", ["", "{", '{"format": 0}', "\x00" * 100])
def test_an_unreadable_current_file_is_replaced(history, base, text):
    history.check(base)
    base.close()
    (history.folder / "base" / "current").write_text(text)
    again = history.base()
    assert again.positions() == {}
    history.check(again)
    again.close()


def test_an_environment_that_lmdb_reports_as_corrupt_is_replaced(history, base, monkeypatch):
    history.check(base)
    real, broken = marks_module.Marks.positions, [True]

    def corrupt_once(self):
        if broken.pop() if broken else False:
            raise lmdb.CorruptedError("a page")
        return real(self)

    monkeypatch.setattr(marks_module.Marks, "positions", corrupt_once)
    generation = data_file(history)
    history.check(base)
    assert data_file(history) != generation


def test_altered_marks_are_detected(history, base):
    base.catch_up(history.lineages[-1], BINS)
    with base._mapped.guarded():
        base._mapped.write(lambda txn: txn.put(b"bins", b"x" * 6148, db=base._mapped.marks))
    history.check(base)


def test_a_folder_that_vanishes_while_in_use_is_recreated(history, base):
    history.check(base, 0)
    for path in (history.folder / "base").rglob("*.mdb"):
        path.unlink()
    history.check(base, 1)


def test_a_missing_or_damaged_file_is_an_error_and_changes_nothing(history, base):
    base.catch_up(history.lineages[0], BINS)
    before = base.positions()
    path = Path(history.files.location) / history.lineages[1].entries[-1].file.name
    data = path.read_bytes()
    path.write_bytes(data[:-1])
    with pytest.raises(CheckpointError, match="is damaged"):
        base.catch_up(history.lineages[1], BINS)
    path.unlink()
    with pytest.raises(CheckpointError, match="is missing"):
        base.view(history.lineages[1], BINS)
    assert base.positions() == before
    path.write_bytes(data)
    history.check(base)


def test_damage_anywhere_in_a_history_is_detected(tmp_path):
    history = History(tmp_path)
    history.commit_many(4, keys=3, size=1)
    for number, entry in enumerate(history.lineages[-1].entries):
        path = Path(history.files.location) / entry.file.name
        data = path.read_bytes()
        path.write_bytes(data[:-9] + bytes([data[-9] ^ 1]) + data[-8:])
        base = Base(str(tmp_path / f"base {number}"), OWNER, history.files)
        with pytest.raises(CheckpointError, match=entry.file.name.split("/")[1]):
            base.catch_up(history.lineages[-1], BINS)
        path.write_bytes(data)
        history.check(base)
        base.close()


def test_a_full_disk_is_a_clear_error_and_nothing_is_lost(history, base, monkeypatch):
    history.check(base)
    history.commit_many(1, keys=2000, size=1000)

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        with pytest.raises(StateError, match=r"the disk is full: \d+ MB more were needed\. Nothing is lost"):
            base.catch_up(history.lineages[-1], BINS)
    history.check(base)


def test_a_folder_that_cannot_be_created_is_a_clear_error(history, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StateError, match=r"cannot be written: .*Free space, or set another local_state="):
        Base(str(tmp_path / "file" / "base"), OWNER, history.files)


def test_a_forked_process_must_open_its_own_base(history, base):
    base._mapped._pid += 1
    with pytest.raises(StateError, match="open it after forking"):
        base.positions()
    base._mapped._pid -= 1


# Other processes

CHILD = """
import sys
from pathlib import Path
from midstream.state import base as base_module, mapped
from midstream.state.base import Base
from midstream.state.files import StateFiles
from midstream.state.lineage import Lineage
mapped.FIRST_SIZE = 1 << 20
folder = Path(sys.argv[1])
lineages = [Lineage.decode(path.read_bytes()) for path in sorted(folder.glob("lineage-*"))]
base = Base(str(folder / "base"), "job 1, count", StateFiles(str(folder / "checkpoint")))
BINS = (0, 7, 255)
def say(text):
    print(text, flush=True)
def hear():
    return sys.stdin.readline().strip()
"""

STOP_INSIDE = """
real, calls = base_module._apply, [0]
def apply(*args):
    real(*args)
    calls[0] += 1
    if calls[0] == int(sys.argv[2]):
        say("inside")
        hear()
base_module._apply = apply
base_module._FEW_DELTAS = int(sys.argv[3])
base.catch_up(lineages[-1], BINS)
say("done")
"""

LOCKSTEP = """
while (word := hear()):
    with base.view(lineages[int(word)], BINS) as view:
        rows = view.table(BINS)
        say(str(hash(tuple(zip(rows["key"].to_pylist(), rows["value"].to_pylist())))))
"""

WHENEVER = """
for lineage in lineages:
    base.catch_up(lineage, BINS)
    say("one")
"""


def child(history: History, script: str, *args: str) -> subprocess.Popen[str]:
    for index, lineage in enumerate(history.lineages):
        (history.folder / f"lineage-{index:04d}").write_bytes(lineage.encode())
    source = str(Path(base_module.__file__).parents[2])
    environment = {**os.environ, "PYTHONPATH": source, "PYTHONHASHSEED": "0"}
    return subprocess.Popen(
        [sys.executable, "-c", CHILD + script, str(history.folder), *args],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )


def heard(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def tell(process: subprocess.Popen[str], text: str) -> None:
    assert process.stdin is not None
    process.stdin.write(text + "\n")
    process.stdin.flush()


def end(process: subprocess.Popen[str]) -> None:
    process.communicate()


@pytest.mark.parametrize("call", ["1", "2", "5", "6"])
@pytest.mark.parametrize("together", ["1", "64"])
def test_a_process_killed_while_catching_up_leaves_a_correct_base(tmp_path, call, together):
    history = History(tmp_path)
    history.commit_many(2, keys=500, size=200)
    victim = child(history, STOP_INSIDE, call, together)
    assert heard(victim) == "inside"
    os.kill(victim.pid, signal.SIGKILL)
    end(victim)
    base = history.base()
    reached = {base.positions().get(number, EMPTY) for number in BINS}
    has_first = int(call) > 3 and together == "1"
    assert reached == {history.lineages[0].position(BINS[0]) if has_first else EMPTY}
    history.check(base)
    base.close()


def test_one_process_writes_at_a_time_and_a_dead_writer_releases_the_guard(tmp_path):
    history = History(tmp_path)
    history.commit_many(1)
    writer = child(history, STOP_INSIDE, "1", "64")
    assert heard(writer) == "inside"
    with (tmp_path / "base" / "guard").open("r+b") as guard:
        with pytest.raises(BlockingIOError):
            fcntl.flock(guard, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.kill(writer.pid, signal.SIGKILL)
        end(writer)
        fcntl.flock(guard, fcntl.LOCK_EX | fcntl.LOCK_NB)
    base = history.base()
    history.check(base)
    base.close()


@pytest.mark.parametrize("lines", [0, 1, 4, 9])
def test_a_process_killed_at_any_time_leaves_a_correct_base(tmp_path, lines):
    history = History(tmp_path)
    history.commit_many(10, keys=300, size=500)
    victim = child(history, WHENEVER)
    assert [heard(victim) for _ in range(lines)] == ["one"] * lines
    os.kill(victim.pid, signal.SIGKILL)
    end(victim)
    base = history.base()
    for epoch in range(lines, 10):
        history.check(base, epoch)
    base.close()


@pytest.mark.long
def test_two_processes_share_a_growing_base(tmp_path):
    history = History(tmp_path)
    history.commit_many(6, keys=400, size=800)
    pair = [child(history, LOCKSTEP), child(history, LOCKSTEP)]
    base = history.base()
    for epoch in range(6):
        for process in pair:
            tell(process, str(epoch))
        answers = {heard(process) for process in pair}
        assert len(answers) == 1
        assert answers != {""}
        history.check(base, epoch)
    for process in pair:
        end(process)
        assert process.returncode == 0
    assert data_file(history).stat().st_size > 1 << 20
    base.close()


def test_a_process_notices_a_replaced_environment(history, base):
    history.check(base)
    other = child(history, LOCKSTEP)
    tell(other, "0")
    assert heard(other)
    with base._mapped.guarded():
        base._mapped.replace()
    history.check(base, 0)
    tell(other, "1")
    assert heard(other)
    end(other)
    assert other.returncode == 0
    assert base.catch_up(history.lineages[1], BINS) == 0
