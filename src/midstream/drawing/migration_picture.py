"""Pictures of a migration: how many bins move from which partition to which, in each stage. As text, and as SVG."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from midstream.drawing.figures import size_text
from midstream.planner.assignment import Assignment

__all__ = ["StageMoves", "migration_to_svg", "migration_to_text"]

_BAR = 24
"""Longest bar of a partition, in characters here and in pixels below."""
_HEIGHT, _GAP, _LEFT, _RIGHT, _TOP = 220, 8, 170, 470, 64
_COLOURS = ("#2f86e0", "#df7226", "#2f9e50", "#9065e0", "#159a93", "#d9569f", "#b98a06", "#768390")

_STYLE = """
.migration{background:#fff}
.migration text{font:12px ui-sans-serif,system-ui,-apple-system,"Segoe UI",Helvetica,Arial,sans-serif;fill:#1f2328}
.migration .title{font-weight:600;font-size:15px}
.migration .before{text-anchor:end}
.migration .head{fill:#6e7781}
.migration path{opacity:.45}.migration path.stays{opacity:.14}
@media (prefers-color-scheme:dark){.migration{background:#0d1117}.migration text{fill:#e6edf3}
.migration .head{fill:#8b949e}.migration path.stays{opacity:.3}}
"""


@dataclass(frozen=True)
class StageMoves:
    """The moves in one stage. ``sizes`` has the bytes of state in each bin, if they are known."""

    name: str
    before: Assignment
    after: Assignment
    sizes: Sequence[float] | None = None

    @property
    def flows(self) -> Counter[tuple[int, int]]:
        """Number of bins by owner before and owner afterwards."""
        return Counter(zip(self.before.owners, self.after.owners, strict=True))

    def bytes_of(self, giver: int, taker: int) -> float:
        """Bytes that go from one partition to another."""
        if self.sizes is None:
            return 0.0
        pairs = zip(self.before.owners, self.after.owners, self.sizes, strict=True)
        return sum(size for old, new, size in pairs if (old, new) == (giver, taker))

    @property
    def moved(self) -> int:
        """Number of bins that move."""
        return sum(count for (old, new), count in self.flows.items() if old != new)

    @property
    def title(self) -> str:
        """The moves, in one line."""
        old, new = self.before.partitions, self.after.partitions
        partitions = f"{new} partitions" if old == new else f"{old} → {new} partitions"
        return f"{self.name}: {self.moved} of {self.after.bins} bins move, {partitions}"


def migration_to_text(stages: Sequence[StageMoves]) -> str:
    """For a terminal: each partition with its bins before and afterwards, and the bins that leave it.

    >>> print(migration_to_text([StageMoves("by user", Assignment(1, (0, 0, 0, 0)), Assignment(2, (0, 1, 0, 1)))]))
    by user: 2 of 4 bins move, 1 → 2 partitions
      partition  before                          afterwards
      0          ████████████████████████     4  ████████████                 2  gives 2 bins to 1
      1                                       0  ████████████                 2  takes 2 bins
    """
    lines: list[str] = []
    for stage in stages:
        before, after, flows = Counter(stage.before.owners), Counter(stage.after.owners), stage.flows
        most = max(*before.values(), *after.values())
        lines += [stage.title, f"  {'partition':<9}  {'before':<30}  afterwards"]
        for partition in range(max(stage.before.partitions, stage.after.partitions)):
            given = {taker: count for (giver, taker), count in sorted(flows.items()) if giver == partition != taker}
            taken = sum(count for (giver, taker), count in flows.items() if taker == partition != giver)
            parts = [
                f"{_bins(count)}{_size(stage.bytes_of(partition, taker))} to {taker}" for taker, count in given.items()
            ]
            notes = [f"gives {', '.join(parts)}"] if parts else []
            if taken:
                notes.append(f"takes {_bins(taken)}")
            bars = "  ".join(_bar(counts[partition], most) for counts in (before, after))
            lines.append(f"  {partition:<9}  {bars}  {'; '.join(notes)}".rstrip())
    return "\n".join(lines)


def migration_to_svg(stages: Sequence[StageMoves]) -> str:
    """A self-contained SVG: partitions before on the left, afterwards on the right; a ribbon is as wide as the number
    of bins that go there."""
    height = _TOP + sum(_span(stage) + 60 for stage in stages)
    width = _RIGHT + _LEFT
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" class="migration" role="img" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}">',
        f"<style>{_STYLE}</style>",
    ]
    top = 30.0
    for stage in stages:
        out.append(f'<text class="title" x="24" y="{top:.0f}">{escape(stage.title)}</text>')
        out.append(f'<text class="head before" x="{_LEFT - 10}" y="{top + 22:.0f}">before</text>')
        out.append(f'<text class="head" x="{_RIGHT + 26}" y="{top + 22:.0f}">afterwards</text>')
        out += _ribbons(stage, top + 34)
        top += _span(stage) + 60
    return "\n".join([*out, "</svg>"])


def _ribbons(stage: StageMoves, top: float) -> list[str]:
    before, after, flows = Counter(stage.before.owners), Counter(stage.after.owners), stage.flows
    scale = _HEIGHT / stage.after.bins
    left = _places(before, stage.before.partitions, top, scale)
    right = _places(after, stage.after.partitions, top, scale)
    out: list[str] = []
    starts, ends = dict(left), dict(right)
    for (giver, taker), count in sorted(flows.items()):
        high, start, end = count * scale, starts[giver], ends[taker]
        starts[giver], ends[taker] = start + high, end + high
        x1, x2, middle = _LEFT + 16, _RIGHT, (_LEFT + 16 + _RIGHT) / 2
        kind = ' class="stays"' if giver == taker else ""
        what = f"{giver} keeps {_bins(count)}" if giver == taker else f"{giver} gives {_bins(count)} to {taker}"
        out.append(
            f'<path{kind} fill="{_COLOURS[giver % len(_COLOURS)]}" d="M{x1} {start:.1f}C{middle:.0f} {start:.1f} '
            f"{middle:.0f} {end:.1f} {x2} {end:.1f}L{x2} {end + high:.1f}C{middle:.0f} {end + high:.1f} {middle:.0f} "
            f'{start + high:.1f} {x1} {start + high:.1f}Z"><title>{what}</title></path>'
        )
    for side, counts, x, at, kind in (
        (left, before, _LEFT, _LEFT - 10, ' class="before"'),
        (right, after, _RIGHT, _RIGHT + 26, ""),
    ):
        for partition, y in side.items():
            high = max(counts[partition] * scale, 1.5)
            out.append(
                f'<rect fill="{_COLOURS[partition % len(_COLOURS)]}" x="{x}" y="{y:.1f}" width="16" '
                f'height="{high:.1f}" rx="2"/>'
            )
            text = f"partition {partition} · {_bins(counts[partition])}"
            out.append(f'<text{kind} x="{at}" y="{y + high / 2 + 4:.1f}">{text}</text>')
    return out


def _places(counts: Mapping[int, int], partitions: int, top: float, scale: float) -> dict[int, float]:
    found: dict[int, float] = {}
    y = top
    for partition in range(partitions):
        found[partition] = y
        y += max(counts.get(partition, 0) * scale, 12) + _GAP
    return found


def _span(stage: StageMoves) -> float:
    most = 0.0
    for assignment in (stage.before, stage.after):
        counts, scale = Counter(assignment.owners), _HEIGHT / assignment.bins
        most = max(most, sum(max(counts[each] * scale, 12) + _GAP for each in range(assignment.partitions)))
    return most


def _bar(count: int, most: int) -> str:
    length = max(1, round(_BAR * count / most)) if count else 0
    return f"{'█' * length:<{_BAR}}  {count:>4}"


def _bins(count: int) -> str:
    return f"{count} bin" if count == 1 else f"{count} bins"


def _size(size: float) -> str:
    return f" ({size_text(size)})" if size else ""
