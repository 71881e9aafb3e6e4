"""Whether every number went through exactly one plan, and when one plan followed another: from the rows that came out.

Knows nothing of flows. Numbers that come out, or not, under both plans say nothing of where one followed the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from benchmarks.workloads.smq.flow import BASE, Change, Plan, numbers

__all__ = ["Seam", "Verdict", "verdict"]

Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Seam:
    """Where a plan followed another: stamps of the last row that certainly went through the old one, and of the first
    row that certainly went through the new one; None if there is no such row."""

    epoch: int
    last_old: float | None
    first_new: float | None


@dataclass
class Verdict:
    """What became of the numbers."""

    rows: int
    lost: int = 0
    """Numbers that should have come out and did not."""
    doubled: int = 0
    """Rows that should not have come out, or not again."""
    problems: list[str] = field(default_factory=list)
    """What else is wrong: rows of a plan that was not there, counts with gaps or out of order."""
    seams: list[Seam] = field(default_factory=list)
    """One for each change."""

    @property
    def is_exact(self) -> bool:
        """Whether nothing is wrong."""
        return not (self.lost or self.doubled or self.problems)


@dataclass(frozen=True)
class _Share:
    """What one partition of the source had in an epoch, and what came out of it."""

    n: npt.NDArray[np.int64]
    times: npt.NDArray[np.int64]
    """How often each number came out."""
    at: npt.NDArray[np.float64]
    """When each number was stamped; NaN if it did not come out."""
    tallied: Flags
    """Whether each number met the second counter."""

    def fits(self, plan: Plan) -> Flags:
        """Of each number: is this what the plan makes of it?"""
        came = self.times > 0
        fits: Flags = (came == plan.passes(self.n)) & (~came | (self.tallied == plan.has_tally))
        return fits


def verdict(
    rows: pa.Table,
    ends: Sequence[int],
    changes: Sequence[tuple[Change, int]] = (),
    *,
    partitions: int,
    tolerance: int = 0,
    first: Plan = BASE,
) -> Verdict:
    """Check the rows of all committed epochs.

    ``ends`` has the number up to which each epoch went, ``changes`` the epoch in which each change was first in effect.
    In that epoch each share of the source may go over to the new plan, once, at any number; all other shares go wholly
    through one plan. ``tolerance`` is by how many epochs it may have come earlier: a driver that was killed takes along
    what it knew of the epoch that it ran. Counts of a key are 1, 2, 3, …, and rise with the numbers of a share.
    """
    found, plan, position = Verdict(rows.num_rows), first, 0
    rows = rows.sort_by("n").combine_chunks()
    for epoch in range(len(ends)):
        shares = list(_shares(rows, ends, epoch, partitions))
        if position < len(changes) and changes[position][1] - tolerance <= epoch:
            change, noted = changes[position]
            if _change(found, epoch, shares, change) or epoch >= noted:
                position, plan = position + 1, change.after
            else:
                found.seams.pop()
        else:
            for share in shares:
                _judge(found, epoch, share, plan.passes(share.n), share.fits(plan))
    if position < len(changes):
        found.problems.append(f"{len(changes) - position} of {len(changes)} changes took effect in no epoch")
    ends_at = np.searchsorted(rows["n"].to_numpy(), [0, *ends])
    stamps = [rows["at"].to_numpy()[start:end] for start, end in pairwise(ends_at)]
    found.seams = [_completed(seam, stamps) for seam in found.seams]
    found.problems += _gaps(rows, ends, partitions, "instance", "count")
    found.problems += _gaps(rows.filter(rows["tally"].is_valid()), ends, partitions, "digit", "tally")
    return found


def _shares(rows: pa.Table, ends: Sequence[int], epoch: int, partitions: int) -> Iterator[_Share]:
    came = rows["n"].to_numpy()
    for start, end in numbers(1.0, partitions=partitions).split(ends[epoch - 1] if epoch else 0, ends[epoch]):
        begin, after = np.searchsorted(came, [start, end])
        here = came[begin:after] - start
        at, tallied = np.full(end - start, np.nan), np.zeros(end - start, bool)
        at[here] = rows["at"].to_numpy()[begin:after]
        tallied[here] = rows["tally"].slice(begin, after - begin).is_valid().to_numpy()
        yield _Share(np.arange(start, end), np.bincount(here, minlength=end - start), at, tallied)


def _change(found: Verdict, epoch: int, shares: Sequence[_Share], change: Change) -> bool:
    """Judge the epoch of a change. Returns whether any row certainly went through the new plan."""
    old, new = [np.empty(0)], [np.empty(0)]
    for share in shares:
        was, now = share.fits(change.before), share.fits(change.after)
        wrong = np.concatenate([[0], np.cumsum(~was)]) + np.concatenate([np.cumsum(~now[::-1])[::-1], [0]])
        seams = np.flatnonzero(wrong == wrong.min())
        least, most = seams[0], seams[-1]
        wanted = np.concatenate([change.before.passes(share.n)[:least], change.after.passes(share.n)[least:]])
        _judge(found, epoch, share, wanted, np.concatenate([was[:least], now[least:]]))
        old.append(share.at[:least])
        new.append(share.at[most:])
    last, begun = (part[~np.isnan(part)] for part in (np.concatenate(old), np.concatenate(new)))
    seam = Seam(epoch, float(last.max()) if len(last) else None, float(begun.min()) if len(begun) else None)
    found.seams.append(seam)
    return seam.first_new is not None


def _judge(found: Verdict, epoch: int, share: _Share, wanted: Flags, fits: Flags) -> None:
    found.lost += int((wanted & (share.times == 0)).sum())
    found.doubled += int(np.maximum(share.times - wanted, 0).sum())
    if strange := int((~fits & wanted & (share.times > 0)).sum()):
        found.problems.append(f"epoch {epoch}: {strange} rows went through a plan that was not there")


def _completed(seam: Seam, stamps: Sequence[npt.NDArray[np.float64]]) -> Seam:
    """If all of an epoch went through one of the plans, the rows of the other one are those of its neighbours."""
    last, first = seam.last_old, seam.first_new
    if last is None and seam.epoch and len(before := stamps[seam.epoch - 1]):
        last = float(before.max())
    if first is None and seam.epoch + 1 < len(stamps) and len(after := stamps[seam.epoch + 1]):
        first = float(after.min())
    return Seam(seam.epoch, last, first)


def _gaps(rows: pa.Table, ends: Sequence[int], partitions: int, key: str, counts: str) -> Iterator[str]:
    """Keys that were not counted one by one, or not in the order of their numbers where that is kept."""
    cuts = [cut for epoch in range(len(ends)) for cut in _cuts(ends, epoch, partitions)]
    n, instance, keys, counted = (rows[name].to_numpy() for name in ("n", "instance", key, counts))
    # What one partition of the source sends to one instance stays in order on all exchanges; what several send may mix.
    share = np.searchsorted(cuts, n, side="right")
    order = np.lexsort((counted, keys))
    begins = np.flatnonzero(np.diff(keys[order], prepend=-1))
    places = np.arange(len(keys)) - np.repeat(begins, np.diff([*begins, len(keys)])) + 1
    for bad in np.unique(keys[order][places != counted[order]]):
        yield f"{key} {bad} was not counted one by one"
    order = np.lexsort((counted, instance, share, keys))
    together = np.all([np.diff(each[order]) == 0 for each in (instance, share, keys)], axis=0)
    for bad in np.unique(keys[order][1:][together & (np.diff(n[order]) <= 0)]):
        yield f"{key} {bad} was counted out of order"


def _cuts(ends: Sequence[int], epoch: int, partitions: int) -> Iterator[int]:
    for _, end in numbers(1.0, partitions=partitions).split(ends[epoch - 1] if epoch else 0, ends[epoch]):
        yield end
