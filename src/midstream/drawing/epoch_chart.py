"""Where an epoch's time went: a Gantt chart as SVG, and the same as text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from midstream.metrics import EpochProgress, Phase

__all__ = ["epoch_as_svg", "epoch_as_text"]

_ROW = 26
_LEFT = 120
_WIDTH = 640
_TOP = 44
_MARGIN = 24

_STYLE = """
.epoch{background:#fff}
.epoch text{font:12px ui-sans-serif,system-ui,-apple-system,"Segoe UI",Helvetica,Arial,sans-serif;fill:#1f2328}
.epoch .title{font-weight:600;font-size:15px}
.epoch .name{text-anchor:end}
.epoch .tick{fill:#6e7781;font-size:11px;text-anchor:middle}
.epoch .grid{stroke:#d8dee4;stroke-width:1}
.epoch .idle{fill:#d8dee4}.epoch .plan{fill:#9065e0}.epoch .stage{fill:#2f86e0}
.epoch .earlier{fill:#d29922}.epoch .sinks{fill:#df7226}.epoch .commit{fill:#2f9e50}
@media (prefers-color-scheme:dark){.epoch{background:#0d1117}.epoch text{fill:#e6edf3}
.epoch .tick{fill:#8b949e}.epoch .grid{stroke:#30363d}.epoch .idle{fill:#484f58}}
"""


def epoch_as_svg(progress: EpochProgress) -> str:
    """One bar for each phase, from its beginning to its end; the time is on the bar's right."""
    phases = progress.phases
    first, last = _span(phases)
    step = _step(last - first)
    scale = _WIDTH / max(last - first, 1e-9)
    height = _TOP + _ROW * len(phases) + 40
    width = _LEFT + _WIDTH + 90 + _MARGIN
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" class="epoch" role="img" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}">',
        f"<style>{_STYLE}</style>",
        f'<text class="title" x="{_MARGIN}" y="26">{escape(_title(progress))}</text>',
    ]
    tick = step * math.ceil(first / step) + 0.0  # never -0
    while tick <= last:
        x = _LEFT + (tick - first) * scale
        out.append(f'<line class="grid" x1="{x:.1f}" y1="{_TOP}" x2="{x:.1f}" y2="{height - 34}"/>')
        out.append(f'<text class="tick" x="{x:.1f}" y="{height - 16}">{tick:g} ms</text>')
        tick += step
    for row, phase in enumerate(phases):
        y, x = _TOP + _ROW * row, _LEFT + (phase.began_ms - first) * scale
        kind = phase.name.split()[0]
        length = max(phase.ms * scale, 1.5)
        out.append(f'<text class="name" x="{_LEFT - 10}" y="{y + 17}">{escape(phase.name)}</text>')
        out.append(
            f'<rect class="{escape(kind)}" x="{x:.1f}" y="{y + 5}" width="{length:.1f}" height="{_ROW - 9}" rx="3">'
            f"<title>{escape(phase.name)}: {phase.began_ms:.1f} to {phase.ended_ms:.1f} ms</title></rect>"
        )
        out.append(f'<text x="{x + length + 6:.1f}" y="{y + 17}">{phase.ms:.0f} ms</text>')
    return "\n".join([*out, "</svg>"])


def epoch_as_text(progress: EpochProgress, width: int = 60) -> str:
    """The same for a terminal.

    >>> phases = (Phase("plan", 0, 10), Phase("stage 0", 10, 40), Phase("commit", 40, 50))
    >>> print(epoch_as_text(EpochProgress(7, 1, 0.0, 50.0, (), 1000, 10, phases), width=10))
    epoch 7 · revision 1 · 1,000 rows · 50 ms
    plan     ██                10 ms
    stage 0    ██████          30 ms
    commit           ██        10 ms
    """
    first, last = _span(progress.phases)
    scale = width / max(last - first, 1e-9)
    name_width = max((len(phase.name) for phase in progress.phases), default=0)
    lines = [_title(progress)]
    for phase in progress.phases:
        begin = round((phase.began_ms - first) * scale)
        length = max(1, round((phase.ended_ms - first) * scale) - begin)
        bar = (" " * begin + "█" * length).ljust(width)
        lines.append(f"{phase.name:<{name_width}}  {bar} {phase.ms:>7.0f} ms")
    return "\n".join(lines)


def _title(progress: EpochProgress) -> str:
    return (
        f"epoch {progress.epoch} · revision {progress.revision} · {progress.rows_in:,} rows · "
        f"{progress.duration_ms:.0f} ms"
    )


def _span(phases: Sequence[Phase]) -> tuple[float, float]:
    return min((phase.began_ms for phase in phases), default=0.0), max(
        (phase.ended_ms for phase in phases), default=0.0
    )


def _step(span: float) -> float:
    """A round number of milliseconds that divides the span into at most eight."""
    step = 1.0
    while span / step > 8:
        step *= 2.5 if str(step)[0] == "2" else 2
    return step
