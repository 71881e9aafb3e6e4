"""Spark's log for a query with other sources, from files to files."""

from __future__ import annotations

import random

import pytest

from midstream.checkpoint.source_positions import log_with_sources
from midstream.errors import CheckpointError
from midstream.ids import Epoch

Log = dict[str, bytes]


def log_of(epoch: int, *lines: dict[int, str]) -> Log:
    """A log with these sources; each has a line by epoch, and a file of its own that says which one it is."""
    found: Log = {"metadata": b"the query"}
    for each in (epoch - 1, epoch):
        if each >= 0:
            text = "\n".join(line.get(each, "-") for line in lines)
            found[f"offsets/{each}"] = f'v1\n{{"batchWatermarkMs":0}}\n{text}'.encode()
            found[f"commits/{each}"] = b'v1\n{"nextBatchWatermarkMs":0}'
    return {**found, **{f"sources/{place}/0": f"file {line}".encode() for place, line in enumerate(lines)}}


def test_sources_that_stay_keep_their_lines_and_files_wherever_they_stand() -> None:
    a, b = {4: '{"a":4}', 5: '{"a":5}'}, {4: '{"b":4}', 5: '{"b":5}'}
    found = log_with_sources(log_of(5, a, b), Epoch(5), ["a", "b"], ["aa", "b", "c"])
    assert found["offsets/5"].split(b"\n") == [b"v1", b'{"batchWatermarkMs":0}', b"-", b'{"b":5}', b"-"]
    assert found["offsets/4"].split(b"\n")[2:] == [b"-", b'{"b":4}', b"-"]
    assert {name for name in found if name.startswith("sources")} == {"sources/1/0"}
    assert found["sources/1/0"] == f"file {b}".encode()
    assert found["metadata"] == b"the query"


def test_a_source_that_comes_back_continues_where_it_was() -> None:
    log = log_of(5, {4: "a4", 5: "a5"}, {4: "b4", 5: "b5"})
    without = log_with_sources(log, Epoch(5), ["a", "b"], ["a"])
    later = {**without, "offsets/8": b"v1\n{}\na8", "offsets/7": b"v1\n{}\na7"}
    del later["offsets/4"], later["offsets/5"]
    back = log_with_sources(later, Epoch(8), ["a"], ["a", "b"])
    assert back["offsets/8"].split(b"\n")[2:] == [b"a8", b"b5"]
    assert back["offsets/7"].split(b"\n")[2:] == [b"a7", b"b5"]
    assert back["sources/1/0"] == log["sources/1/0"]
    assert not [name for name in back if name.startswith("kept")]


def test_a_commit_that_spark_had_not_written_is_written() -> None:
    """The epoch has a manifest, so it must not be asked for again: its entry would be another one."""
    log = log_of(3, {2: "2", 3: "3"})
    del log["commits/3"]
    assert log_with_sources(log, Epoch(3), ["a"], ["a", "b"])["commits/3"] == b'v1\n{"nextBatchWatermarkMs":0}'


def test_sources_whose_names_cannot_name_files_are_kept() -> None:
    log = log_of(0, {0: "x"}, {0: "y"})
    gone = log_with_sources(log, Epoch(0), ["a/b %", "z"], ["z"])
    assert log_with_sources(gone, Epoch(0), ["z"], ["a/b %", "z"])["offsets/0"].split(b"\n")[2:] == [b"x", b"y"]


def test_before_the_first_epoch_only_the_memory_of_sources_is_copied() -> None:
    log = log_of(-1, {}, {})
    found = log_with_sources(log, Epoch(-1), ["a", "b"], ["b"])
    assert found == {"metadata": b"the query", "sources/0/0": log["sources/1/0"]}


def test_a_log_with_other_streams_than_sources_is_refused() -> None:
    with pytest.raises(CheckpointError, match=r"counts 2 streams \(offsets/0\), and the flow has 1 sources, 'a'"):
        log_with_sources(log_of(0, {0: "x"}, {0: "y"}), Epoch(0), ["a"], ["a", "b"])


def test_no_position_is_lost_however_often_sources_change() -> None:
    """The oracle is a dict: how far each source was read when it was last there."""
    for seed in range(200):
        rng = random.Random(seed)
        names = ["a", "b", "c", "d"]
        there = sorted(rng.sample(names, 2))
        read = dict.fromkeys(names, 0)
        log: Log = log_of(-1, *[{} for _ in there])
        epoch = -1
        for _ in range(8):
            for _ in range(rng.randint(0, 3)):
                epoch += 1
                read |= {name: read[name] + rng.randint(0, 2) for name in there}
                entry = "v1\n{}\n" + "\n".join(str(read[name] or "-") for name in there)
                log |= {f"offsets/{epoch}": entry.encode(), f"commits/{epoch}": b"v1\n{}"}
                log.pop(f"offsets/{epoch - 2}", None)
            after = sorted(rng.sample(names, rng.randint(1, 4)))
            log = log_with_sources(log, Epoch(epoch), there, after)
            there = after
            if epoch >= 0:
                assert log[f"offsets/{epoch}"].decode().split("\n")[2:] == [str(read[name] or "-") for name in there]
