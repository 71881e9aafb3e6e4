"""A job on one card, as HTML for notebooks: its flow, its figures, its last changes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from midstream.drawing.figures import FIGURES, figures_of, size_text
from midstream.drawing.picture import picture
from midstream.drawing.svg import svg
from midstream.flow.model import Graph
from midstream.observation import Observation

__all__ = ["CardChange", "JobCard"]

# Colours are the notebook's own, so that the card suits its light and its dark theme.
_STYLE = """\
.midstream-card{font-family:ui-sans-serif,system-ui,-apple-system,"Segoe UI",Helvetica,Arial,sans-serif;font-size:13px}
.midstream-card svg{max-width:100%;height:auto;margin:6px 0}
.midstream-card table{border-collapse:collapse;margin:4px 0 8px}
.midstream-card th,.midstream-card td{padding:1px 10px 1px 0;text-align:right;font-variant-numeric:tabular-nums}
.midstream-card th{font-weight:600;opacity:.65}
.midstream-card th:first-child,.midstream-card td:first-child{text-align:left}
.midstream-card .words td,.midstream-card .words th{text-align:left}
.midstream-card .wrong{color:#c2410c}
"""


@dataclass(frozen=True)
class CardChange:
    """A change as the card shows it."""

    number: int
    outcome: str
    subjects: str
    delay_ms: float | None = None
    note: str = ""


@dataclass(frozen=True)
class JobCard:
    """The content of a card.

    >>> card = JobCard(Graph("fraud", ()), "running", 3, None, (CardChange(2, "applied", "FM", 12.4),))
    >>> "revision 3" in card.to_html() and "12.4 ms" in card.to_html()
    True
    """

    graph: Graph
    status: str
    revision: int
    seen: Observation | None
    changes: Sequence[CardChange] = ()
    """The last ones, newest first."""
    error: str = ""

    def to_html(self) -> str:
        """The card, with everything it needs inside."""
        title = f"<b>{escape(self.graph.name)}</b> is {escape(self.status)}, revision {self.revision}"
        return "\n".join(
            [
                f"<style>{_STYLE}</style>",
                f'<div class="midstream-card"><div>{title}{self._speed()}</div>',
                f'<pre class="wrong">{escape(self.error)}</pre>' if self.error else "",
                svg(picture(self.graph, {}, "")) if self.graph.operators else "",
                self._operators(),
                self._changes(),
                "</div>",
            ]
        )

    def _speed(self) -> str:
        if self.seen is None:
            return "; no epoch has been committed yet"
        share = 100 * self.seen.utilisation
        return (
            f"; epoch {self.seen.epoch}: {self.seen.rows_per_s:,.0f} rows/s, {self.seen.duration_ms:,.0f} ms "
            f"({share:.0f}% of the time), workers {size_text(self.seen.worker_memory_bytes)}"
        )

    def _operators(self) -> str:
        if self.seen is None:
            return ""
        rows = [(each.operator, *figures_of(each, self.seen.elapsed_ms)) for each in self.seen.operators]
        return _table(("operator", *FIGURES), rows)

    def _changes(self) -> str:
        rows = [
            (
                str(change.number),
                change.outcome,
                change.subjects,
                "" if change.delay_ms is None else f"in effect after {change.delay_ms:,.1f} ms",
                change.note,
            )
            for change in self.changes
        ]
        return _table(("change", "outcome", "of", "", "note"), rows, "words") if rows else ""


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], kind: str = "") -> str:
    cells = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f'<table class="{kind}"><thead><tr>{cells}</tr></thead><tbody>{body}</tbody></table>'
