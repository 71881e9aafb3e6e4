"""Places boxes and arrows in a drawing: columns from left to right, few crossings, straight lines.

The classic layered method in three steps: every box gets a *column* (longest path from a source), the boxes of a column
get an *order* (barycentre sweeps, keeping the best), and each gets a *height* as close as possible to its neighbours'
(least squares subject to order and distance). An arrow over several columns is a chain of short arrows with a *bend* in
each column it crosses. Bends take part in all steps, so arrows go around boxes, never over them.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

BOX_HEIGHT = 46.0
_BEND_HEIGHT = 10.0
_ROW_GAP = 20.0
_COLUMN_GAP = 40.0
_LABEL_MARGIN = 44.0
_SWEEPS = 12


@dataclass(frozen=True)
class Link:
    """An arrow to place: box numbers with ``tail < head``, and the width of its label."""

    tail: int
    head: int
    label_width: float = 0.0


@dataclass(frozen=True)
class Rect:
    """A placed box; ``x`` and ``y`` are its upper left corner."""

    x: float
    y: float
    width: float
    height: float


@dataclass(frozen=True)
class GraphLayout:
    """A finished layout. The points of a route come in pairs: within a pair the arrow swings from one column to the
    next, between pairs it runs straight through a column."""

    boxes: tuple[Rect, ...]
    routes: tuple[tuple[tuple[float, float], ...], ...]
    width: float
    height: float


@dataclass(frozen=True)
class _Chains:
    """Links cut into steps between columns. Items are boxes first, then bends; all lists are indexed by item."""

    columns: list[int]
    boxes: int
    paths: list[list[int]]

    @property
    def steps(self) -> Iterator[tuple[int, int]]:
        for path in self.paths:
            yield from pairwise(path)

    def neighbours(self) -> tuple[list[list[int]], list[list[int]]]:
        """Items one step to the left, and one step to the right."""
        left: list[list[int]] = [[] for _ in self.columns]
        right: list[list[int]] = [[] for _ in self.columns]
        for a, b in self.steps:
            right[a].append(b)
            left[b].append(a)
        return left, right


def arrange(widths: Sequence[float], links: Sequence[Link]) -> GraphLayout:
    """Place boxes of these widths. Boxes must be numbered so that every link's tail comes before its head.

    >>> found = arrange([80, 80, 80], [Link(0, 1), Link(0, 2)])
    >>> [(box.x, box.y) for box in found.boxes]
    [(0.0, 33.0), (120.0, 0.0), (120.0, 66.0)]
    """
    if not widths:
        return GraphLayout((), (), 0.0, 0.0)
    chains = _cut(_columns(len(widths), links), links)
    middles = _heights(chains, _order(chains))
    starts, spans = _spread(widths, links, chains.columns)

    def rect(box: int) -> Rect:
        column = chains.columns[box]
        return Rect(starts[column], middles[box] - BOX_HEIGHT / 2, spans[column], BOX_HEIGHT)

    def route(path: list[int]) -> Iterator[tuple[float, float]]:
        for a, b in pairwise(path):
            column = chains.columns[a]
            yield starts[column] + spans[column], middles[a]
            yield starts[column + 1], middles[b]

    boxes = tuple(rect(i) for i in range(len(widths)))
    height = max(middles) + BOX_HEIGHT / 2
    return GraphLayout(boxes, tuple(tuple(route(path)) for path in chains.paths), starts[-1] + spans[-1], height)


def _columns(count: int, links: Sequence[Link]) -> list[int]:
    """Longest path from a source; then chains that only one box waits for move right, next to that box."""
    tails: list[list[int]] = [[] for _ in range(count)]
    heads: list[list[int]] = [[] for _ in range(count)]
    for link in links:
        tails[link.head].append(link.tail)
        heads[link.tail].append(link.head)
    columns = [0] * count
    movable = [False] * count
    for box in range(count):
        columns[box] = max((columns[tail] + 1 for tail in tails[box]), default=0)
        movable[box] = all(movable[tail] and len(heads[tail]) == 1 for tail in tails[box])
    for box in reversed(range(count)):
        if movable[box] and heads[box]:
            columns[box] = min(columns[head] for head in heads[box]) - 1
    first = min(columns)
    return [column - first for column in columns]


def _cut(columns: list[int], links: Sequence[Link]) -> _Chains:
    items = list(columns)
    paths = []
    for link in links:
        bends = range(len(items), len(items) + columns[link.head] - columns[link.tail] - 1)
        items.extend(range(columns[link.tail] + 1, columns[link.head]))
        paths.append([link.tail, *bends, link.head])
    return _Chains(items, len(columns), paths)


def _order(chains: _Chains) -> list[list[int]]:
    """Items of each column from top to bottom."""
    left, right = chains.neighbours()
    layers: list[list[int]] = [[] for _ in range(max(chains.columns) + 1)]
    for item in _depth_first(chains, right):
        layers[chains.columns[item]].append(item)
    best, fewest = [list(layer) for layer in layers], _crossings(layers, right)
    for sweep in range(_SWEEPS):
        if not fewest:
            break
        rightwards = sweep % 2 == 0
        for layer in layers if rightwards else reversed(layers):
            _sort_by_barycentre(layer, layers, chains.columns, left if rightwards else right)
        crossings = _crossings(layers, right)
        if crossings < fewest:
            best, fewest = [list(layer) for layer in layers], crossings
    return best


def _depth_first(chains: _Chains, right: list[list[int]]) -> Iterator[int]:
    """All items, each branch to its end before the next: a first order with connected items at similar heights."""
    seen: set[int] = set()
    has_tail = {b for _, b in chains.steps}
    waiting = [item for item in reversed(range(len(chains.columns))) if item not in has_tail]
    while waiting:
        item = waiting.pop()
        if item not in seen:
            seen.add(item)
            yield item
            waiting.extend(reversed(right[item]))


def _sort_by_barycentre(
    layer: list[int], layers: list[list[int]], columns: list[int], neighbours: list[list[int]]
) -> None:
    others = {columns[n] for item in layer for n in neighbours[item]}
    place = {item: i for other in others for i, item in enumerate(layers[other])}
    own = {item: float(i) for i, item in enumerate(layer)}

    def centre(item: int) -> float:
        places = [place[n] for n in neighbours[item]]
        return sum(places) / len(places) if places else own[item]

    layer.sort(key=centre)


def _crossings(layers: list[list[int]], right: list[list[int]]) -> int:
    """Pairs of steps that cross: inversions among the right ends once the left ends are sorted."""
    total = 0
    for layer, following in pairwise(layers):
        place = {item: i for i, item in enumerate(following)}
        seen: list[int] = []
        for item in layer:
            ends = sorted(place[n] for n in right[item])
            total += sum(len(seen) - bisect_right(seen, end) for end in ends)
            for end in ends:
                insort(seen, end)
    return total


def _heights(chains: _Chains, layers: list[list[int]]) -> list[float]:
    """The middle of each item; the topmost box ends up at 0 or below."""
    left, right = chains.neighbours()
    sizes = [BOX_HEIGHT if item < chains.boxes else _BEND_HEIGHT for item in range(len(chains.columns))]
    middles = [0.0] * len(sizes)
    for layer in layers:
        _settle(layer, [0.0] * len(layer), [1.0] * len(layer), sizes, middles)
    for sweep in range(2 * _SWEEPS):
        # First towards one side, which pulls whole branches into place; finally towards both, which centres.
        sides = [left, right] if sweep >= _SWEEPS else [left] if sweep % 2 == 0 else [right]
        for layer in layers if sweep % 2 == 0 else reversed(layers):
            wishes, weights = [], []
            for item in layer:
                pulls = [(middles[n], _stiffness(item, n, chains.boxes)) for side in sides for n in side[item]]
                weight = sum(w for _, w in pulls)
                wishes.append(sum(m * w for m, w in pulls) / weight if weight else middles[item])
                weights.append(weight or 0.1)
            _settle(layer, wishes, weights, sizes, middles)
    top = min(middle - size / 2 for middle, size in zip(middles, sizes, strict=True))
    return [round(middle - top, 1) for middle in middles]


def _stiffness(a: int, b: int, boxes: int) -> float:
    """Weights that keep the middle of long arrows straight, even if boxes have to move a little."""
    return (1.0, 2.0, 8.0)[(a >= boxes) + (b >= boxes)]


def _settle(
    layer: list[int], wishes: list[float], weights: list[float], sizes: list[float], middles: list[float]
) -> None:
    """Set `middles` of a column as close to `wishes` as order and distance allow: isotonic least squares.

    Subtracting each item's smallest possible offset turns "at least this far apart" into "not decreasing", which
    pooling adjacent violators solves exactly in one pass.
    """
    offsets = [0.0]
    for a, b in pairwise(layer):
        offsets.append(offsets[-1] + (sizes[a] + sizes[b]) / 2 + _ROW_GAP)
    pools: list[tuple[float, float, int]] = []  # mean, weight, length
    for wish, offset, weight in zip(wishes, offsets, weights, strict=False):
        mean, total, length = wish - offset, weight, 1
        while pools and pools[-1][0] > mean:
            before, more, items = pools.pop()
            mean = (before * more + mean * total) / (more + total)
            total, length = more + total, length + items
        pools.append((mean, total, length))
    level = [mean for mean, _, length in pools for _ in range(length)]
    for item, mean, offset in zip(layer, level, offsets, strict=False):
        middles[item] = mean + offset


def _spread(widths: Sequence[float], links: Sequence[Link], columns: list[int]) -> tuple[list[float], list[float]]:
    """Left edge and width of each column: as wide as its widest box, as far apart as the widest label needs."""
    count = max(columns) + 1
    spans = [0.0] * count
    gaps = [_COLUMN_GAP] * count
    for width, column in zip(widths, columns, strict=False):
        spans[column] = max(spans[column], float(width))
    for link in links:
        if link.label_width:
            column = columns[link.tail]
            gaps[column] = max(gaps[column], link.label_width + _LABEL_MARGIN)
    starts = [0.0]
    for span, gap in zip(spans[:-1], gaps[:-1], strict=True):
        starts.append(starts[-1] + span + gap)
    return starts, spans
