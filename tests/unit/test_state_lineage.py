"""Lineage: which files make up the state, what a base lacks, which rewrites are due, which files are garbage."""

from __future__ import annotations

from itertools import pairwise

import pytest

from midstream.errors import CheckpointError, StateError
from midstream.ids import BinId, Epoch, PartitionId
from midstream.state import lineage as module
from midstream.state.files import FileRef
from midstream.state.garbage import garbage
from midstream.state.lineage import EMPTY, Lineage, Position, Rewrite

A, B, C = BinId(0), BinId(7), BinId(255)
FIRST, TURN = PartitionId(0), Epoch(6)
"""An epoch in which the first partition may merge, with the small thresholds of these tests."""


def file(epoch: int, counts: dict[BinId, int], tag: str = "") -> FileRef:
    """A delta with a readable digest: d3, or d3x for another attempt at epoch 3."""
    digest = f"d{epoch}{tag}".encode()
    name = f"count/{epoch:010d}-0-0-0-delta-{digest.hex():0>16}.arrow"
    return FileRef(name, 100, digest, sum(counts.values()), bytes(counts), tuple(counts.values()))


def grown(*deltas: dict[BinId, int]) -> Lineage:
    lineage = Lineage.start("count")
    for epoch, counts in enumerate(deltas):
        lineage = lineage.after(Epoch(epoch), [file(epoch, counts)] if counts else [])
    return lineage


def snapshot(lineage: Lineage, tag: str, **rows: int) -> Rewrite:
    bins = {"a": A, "b": B, "c": C}
    counts = {bins[name]: count for name, count in rows.items()}
    ref = file(lineage.epoch + 1, {number: count for number, count in counts.items() if count}, tag)
    return Rewrite(ref, bytes(counts), tuple(one.digest for one in lineage.files_of(counts)), complete=True)


def steps(lineage: Lineage, held: dict[BinId, bytes], *bins: BinId):
    found = lineage.missing({number: Position(position) for number, position in held.items()}, bins)
    return sorted(found.clear), [(step.file.digest, step.positions) for step in found.apply]


def test_a_new_operator_has_no_state():
    lineage = Lineage.start("count")
    assert lineage.position(A) == EMPTY
    assert not lineage.missing({}, [A, B])
    assert lineage.bins() == []


def test_a_new_base_applies_everything_in_order():
    lineage = grown({A: 1, B: 1}, {B: 1}, {A: 1})
    assert steps(lineage, {}, A, B) == (
        [],
        [(b"d0", {A: b"d0", B: b"d0"}), (b"d1", {B: b"d1"}), (b"d2", {A: b"d2"})],
    )


def test_a_base_applies_what_it_lacks_of_the_requested_bins():
    lineage = grown({A: 1, B: 1}, {B: 1}, {A: 1})
    assert steps(lineage, {A: b"d0", B: b"d1"}, A, B) == ([], [(b"d2", {A: b"d2"})])
    assert steps(lineage, {A: b"d0", B: b"d0"}, B) == ([], [(b"d1", {B: b"d1"})])
    assert steps(lineage, {A: b"d2", B: b"d1"}, A, B) == ([], [])


def test_a_base_that_applied_another_attempt_rebuilds_the_bin():
    lineage = grown({A: 1, B: 1}, {A: 1, B: 1})
    assert steps(lineage, {A: b"d1x", B: b"d1"}, A, B) == ([A], [(b"d0", {A: b"d0"}), (b"d1", {A: b"d1"})])


def test_a_base_that_is_ahead_is_rebuilt():
    lineage = grown({A: 1})
    assert steps(lineage, {A: b"d5", B: b"d5"}, A, B) == ([A, B], [(b"d0", {A: b"d0"})])


def test_a_snapshot_replaces_the_history_of_its_bins_and_no_other():
    before = grown({A: 1, B: 1}, {A: 1, B: 1})
    lineage = before.after(Epoch(2), [file(2, {A: 1, B: 1})], [snapshot(before, "s", a=5)])
    assert steps(lineage, {}, A) == ([], [(b"d2s", {A: b"d1"}), (b"d2", {A: b"d2"})])
    assert steps(lineage, {}, B) == ([], [(b"d0", {B: b"d0"}), (b"d1", {B: b"d1"}), (b"d2", {B: b"d2"})])
    assert (lineage.rows[A], lineage.keys[A]) == (1, 5)
    assert (lineage.rows[B], lineage.keys[B]) == (3, 0)


def test_the_base_a_snapshot_was_taken_from_need_not_load_it():
    before = grown({A: 1}, {A: 1})
    lineage = before.after(Epoch(2), [file(2, {A: 1})], [snapshot(before, "s", a=5)])
    assert steps(lineage, {A: b"d1"}, A) == ([], [(b"d2", {A: b"d2"})])
    assert steps(lineage, {A: b"d0"}, A) == ([A], [(b"d2s", {A: b"d1"}), (b"d2", {A: b"d2"})])


def test_a_snapshot_of_a_bin_that_became_empty_counts():
    before = grown({A: 2}, {A: 2})
    lineage = before.after(Epoch(2), [], [snapshot(before, "s", a=0)])
    assert steps(lineage, {}, A) == ([], [(b"d2s", {A: b"d1"})])
    assert (lineage.rows[A], lineage.keys[A]) == (0, 0)


def test_files_that_are_live_for_no_bin_leave_the_lineage():
    before = grown({A: 1}, {A: 1, B: 1}, {B: 1})
    lineage = before.after(Epoch(3), [], [snapshot(before, "s", a=1, b=2)])
    assert [entry.file.digest for entry in lineage.entries] == [b"d3s"]
    assert lineage.positions([A, B]) == {A: b"d1", B: b"d2"}


def test_a_merged_file_replaces_many_deltas(monkeypatch):
    monkeypatch.setattr(module, "MERGED_AT_ONCE", 3)
    assert grown({A: 1}).due_for_merging([A, B], TURN, FIRST) == []
    before = grown({A: 1}, {A: 1, B: 1}, {A: 1, C: 1})
    assert before.due_for_merging([A, B], Epoch(TURN + 1), FIRST) == []
    due = before.due_for_merging([A, B], TURN, FIRST)
    assert [(one.digest, bins) for one, bins in due] == [(b"d0", [A]), (b"d1", [A, B]), (b"d2", [A])]
    rewrite = Rewrite(file(3, {A: 1, B: 1}, "m"), bytes([A, B]), tuple(one.digest for one, _ in due), complete=False)
    lineage = before.after(Epoch(3), [file(3, {A: 1, B: 1})], [rewrite])
    assert steps(lineage, {}, A, B, C) == (
        [],
        [(b"d2", {C: b"d2"}), (b"d3m", {A: b"d2", B: b"d1"}), (b"d3", {A: b"d3", B: b"d3"})],
    )
    assert steps(lineage, {A: b"d2", B: b"d1"}, A, B) == ([], [(b"d3", {A: b"d3", B: b"d3"})])


def merge_of(lineage: Lineage, *bins: BinId) -> Rewrite:
    """All deltas of these bins as one file."""
    epoch = Epoch(lineage.epoch + 1)
    replaced = tuple(entry.file.digest for entry in lineage.entries if entry.single)
    return Rewrite(file(epoch, dict.fromkeys(bins, 1), "m"), bytes(bins), replaced, complete=False)


def test_a_base_that_is_at_one_of_merged_deltas_needs_the_merged_file_and_newer_ones():
    """It has the last row of each key that changed; read from the beginning, a bin would be all of its state."""
    first = grown({A: 9, B: 9})
    before = first.after(Epoch(1), [file(1, {A: 1, B: 1})], [snapshot(first, "s", a=9, b=9)])
    for epoch in (2, 3):
        before = before.after(Epoch(epoch), [file(epoch, {A: 1, B: 1})])
    lineage = before.after(Epoch(4), [file(4, {A: 1, B: 1})], [merge_of(before, A, B)])
    newer = [(b"d4m", {A: b"d3"}), (b"d4", {A: b"d4"})]
    for at in (b"d1", b"d2"):
        assert steps(lineage, {A: at}, A) == ([], newer)
        assert steps(lineage.only([A]), {A: at}, A) == ([], newer)
    assert steps(lineage, {A: b"d3"}, A) == ([], newer[1:])
    for at in (b"", b"d0"):  # the snapshot was taken there
        known = {A: at} if at else {}
        assert [digest for digest, _ in steps(lineage, known, A)[1]] == [*([] if at else [b"d1s"]), b"d4m", b"d4"]
    for epoch in range(5, 4 + module.FOLLOWED + 2):
        lineage = lineage.after(Epoch(epoch), [])
    assert steps(lineage, {A: b"d2"}, A)[0] == [A], "that far behind, it begins anew"


def test_a_bin_whose_snapshot_is_newer_than_the_position_of_a_base_is_not_taken_for_one_of_merged_deltas():
    """The first delta was merged for another bin only: the merged file does not have all that the base lacks."""
    before = grown({A: 1, B: 1}, {A: 1, B: 1})
    before = before.after(Epoch(2), [file(2, {A: 1, B: 1})], [snapshot(before, "s", a=1)])
    lineage = before.after(Epoch(3), [], [merge_of(before, A, B)])
    assert steps(lineage, {A: b"d0"}, A)[0] == [A]
    assert steps(lineage, {B: b"d0"}, B) == ([], [(b"d3m", {B: b"d2"})])


@pytest.mark.parametrize("first", [0, 5, 11])
def test_partitions_merge_in_turns_and_none_has_far_too_many_deltas(first: int):
    """If all merged in the same epoch, its rows would wait; seen: every sixteenth epoch took half as long again."""
    partitions = {PartitionId(number): BinId(number) for number in range(4)}
    lineage, merged = Lineage.start("count"), dict[int, list[PartitionId]]()
    for epoch in map(Epoch, range(first, first + 12 * module.MERGED_AT_ONCE)):
        rewrites = []
        for partition, own in partitions.items():
            if due := lineage.due_for_merging([own], epoch, partition):
                merged.setdefault(epoch, []).append(partition)
                replaced = tuple(one.digest for one, _ in due)
                rewrites.append(Rewrite(file(epoch, {own: 1}, f"m{own}"), bytes([own]), replaced, complete=False))
        deltas = [file(epoch, {own: 1}, f"p{own}") for own in partitions.values()]
        lineage = lineage.after(epoch, deltas, rewrites)
        for own in partitions.values():
            assert sum(entry.single for entry in lineage.only([own]).entries) <= 1.5 * module.MERGED_AT_ONCE
    assert all(len(found) == 1 for found in merged.values())
    for partition in partitions:
        turns = [epoch for epoch, found in merged.items() if partition in found]
        assert {after - before for before, after in pairwise(turns)} == {module.MERGED_AT_ONCE}


def test_a_delta_older_than_a_snapshot_is_not_merged_for_its_bins(monkeypatch):
    monkeypatch.setattr(module, "MERGED_AT_ONCE", 2)
    before = grown({A: 1, B: 1})
    lineage = before.after(Epoch(1), [file(1, {A: 1, B: 1})], [snapshot(before, "s", a=1)])
    assert [(one.digest, bins) for one, bins in lineage.due_for_merging([A, B], TURN, FIRST)] == [
        (b"d0", [B]),
        (b"d1", [A, B]),
    ]


def test_a_bin_is_due_if_its_deltas_have_more_rows_than_its_snapshot():
    assert grown({A: 1000}).due_for_snapshot([A], touched=10) == []
    heavy = grown({A: 1000}, {A: 1, B: 1})
    assert heavy.due_for_snapshot([A, B], touched=10) == [A]
    lineage = heavy.after(Epoch(2), [file(2, {A: 5000})], [snapshot(heavy, "s", a=5000)])
    assert lineage.due_for_snapshot([A], touched=10) == []
    assert lineage.after(Epoch(3), [file(3, {A: 1})]).due_for_snapshot([A], touched=10) == [A]


def test_a_bin_with_a_long_history_is_due_even_with_few_rows(monkeypatch):
    monkeypatch.setattr(module, "MAX_ENTRIES", 2)
    assert grown({A: 1}, {A: 1}).due_for_snapshot([A], touched=1) == []
    assert grown({A: 1}, {A: 1}, {A: 1}).due_for_snapshot([A], touched=1) == [A]


def test_bins_due_together_are_spread_over_epochs_most_urgent_first():
    lineage = grown({A: 30_000, B: 40_000, C: 20_000})
    assert lineage.due_for_snapshot([A, B, C], touched=0) == [B]
    assert lineage.due_for_snapshot([A, B, C], touched=20_000) == [B, A]
    assert lineage.due_for_snapshot([A, B, C], touched=90_000) == [B, A, C]


def test_two_tasks_cannot_change_one_bin():
    with pytest.raises(StateError, match=r"two tasks changed the bins \[7\]"):
        Lineage.start("count").after(Epoch(0), [file(0, {A: 1, B: 1}), file(0, {B: 1}, "x")])


def test_epochs_must_increase():
    with pytest.raises(StateError, match="epoch 1 cannot follow epoch 1"):
        grown({A: 1}, {A: 1}).after(Epoch(1), [])


def test_a_rewrite_made_from_another_state_is_refused():
    rewrite = snapshot(grown({A: 1}, {A: 1}), "s", a=1)
    with pytest.raises(StateError, match="made from another state"):
        grown({A: 1}).after(Epoch(1), [], [rewrite])


def test_garbage_is_what_no_kept_manifest_refers_to():
    before = grown({A: 1}, {A: 1})
    after = before.after(Epoch(2), [file(2, {A: 1})], [snapshot(before, "s", a=1)])
    spare = file(2, {A: 1}, "x")  # a speculative attempt that lost
    running = file(3, {A: 1})
    names = [one.name for one in [*before.files_of([A]), *after.files_of([A]), spare, running]]
    old = [one.name for one in before.files_of([A])]
    assert garbage(names, [before, after], settled=Epoch(2)) == [spare.name]
    assert garbage(names, [after], settled=Epoch(2)) == [*old, spare.name]
    assert garbage(["notes.txt"], [], settled=Epoch(9)) == []


def test_a_lineage_is_small_in_a_manifest():
    every = {BinId(number): 40 for number in range(256)}
    lineage = grown(*[every] * 16)
    assert Lineage.decode(lineage.encode()) == lineage
    assert len(lineage.encode()) < 16 * 150 + 1500


def test_bytes_that_are_not_a_lineage_are_an_error():
    with pytest.raises(CheckpointError, match="a state lineage is damaged"):
        Lineage.decode(grown({A: 1}).encode()[:-3])
