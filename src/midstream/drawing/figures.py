"""Figures as people read them: counts, sizes and names in few characters."""

from __future__ import annotations

from midstream.observation import OperatorObservation

__all__ = ["FIGURES", "NONE", "count_text", "figures_of", "short_text", "size_text"]

NONE = "–"
"""Shown in place of a missing figure."""

FIGURES = ("in/s", "out/s", "busy", "µs/row", "p50 ms", "p99 ms", "state", "hot key")
"""The figures that :func:`figures_of` returns for an operator."""


def figures_of(seen: OperatorObservation, elapsed_ms: float) -> tuple[str, ...]:
    """An operator's figures in an epoch that ended ``elapsed_ms`` after the one before, in the order of
    :data:`FIGURES`.

    >>> figures_of(OperatorObservation(operator="FM", kind="map", rows_in=10, rows_out=9, busy_ms=5.0), 100.0)
    ('100', '90', '0.00', '500.0', '–', '–', '', '')
    """

    def rate(rows: int) -> str:
        return count_text(1000 * rows / elapsed_ms) if elapsed_ms else NONE

    heaviest = seen.heavy_keys.heaviest
    return (
        rate(seen.rows_in),
        rate(seen.rows_out),
        f"{seen.busy_share:.2f}",
        f"{seen.us_per_row:,.1f}" if seen.rows_in else NONE,
        NONE if seen.latency_p50_ms is None else count_text(seen.latency_p50_ms),
        NONE if seen.latency_p99_ms is None else count_text(seen.latency_p99_ms),
        size_text(seen.state_bytes) if seen.state_files else "",
        "" if heaviest is None else f"{short_text(heaviest[0], 8)} {100 * heaviest[1]:.0f}%",
    )


def count_text(number: float) -> str:
    """A number in at most five characters or so.

    >>> count_text(12.3), count_text(12_345), count_text(1_234_567)
    ('12', '12.3k', '1.2M')
    """
    for limit, unit in ((1e6, "M"), (1e4, "k")):
        if number >= limit:
            return f"{number / {'M': 1e6, 'k': 1e3}[unit]:.1f}{unit}"
    return f"{number:.0f}"


def size_text(size: float) -> str:
    """A number of bytes for people.

    >>> size_text(999), size_text(1_500_000)
    ('999 B', '1.5 MB')
    """
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= factor:
            return f"{size / factor:,.1f} {unit}"
    return f"{size:,.0f} B"


def short_text(text: str, length: int) -> str:
    """A text, cut to at most ``length`` characters.

    >>> short_text("alpha", 4)
    'alp…'
    """
    return text if len(text) <= length else f"{text[: length - 1]}…"
