"""Cuts moves into as few steps as possible, such that no partition takes part in two moves of a step. Pure.

This is colouring the edges of a multigraph: partitions are its vertices, moves its edges, and a colour is a step. No
fewer steps are possible than the largest number of moves of any partition, its *degree*.

=================================================  =========================================================
moves                                              number of steps
=================================================  =========================================================
no partition both gives and takes                  the largest degree, which is the least (König)
``lax``: a partition may give one and take one     the largest number of bins given or taken, the least too
at most :data:`EXACT_MOVES`                        the least, by search
otherwise                                          at most ``3 * ceil(degree / 2)`` (Shannon); usually the
                                                   largest degree, or one more. To find the least is NP-hard
=================================================  =========================================================
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

__all__ = ["EXACT_MOVES", "disjoint_steps", "largest_degree"]

EXACT_MOVES = 9
"""Most moves for which the least number of steps is searched for; that takes a few milliseconds."""

Edge = tuple[int, int]
"""The partition that gives, and the one that takes."""


def largest_degree(moves: Sequence[Edge], *, lax: bool = False) -> int:
    """No fewer steps are possible.

    >>> largest_degree([(0, 2), (0, 3), (1, 2)]), largest_degree([(0, 1), (1, 2)], lax=True)
    (2, 1)
    """
    if lax:
        return max([*Counter(giver for giver, _ in moves).values(), *Counter(taker for _, taker in moves).values()])
    return max(Counter(partition for move in moves for partition in move).values())


def disjoint_steps(moves: Sequence[Edge], *, lax: bool = False) -> list[list[int]]:
    """The steps, each as positions in ``moves``; the largest steps come first.

    >>> disjoint_steps([(0, 2), (0, 3), (1, 2), (1, 3)])
    [[0, 3], [1, 2]]
    """
    if not moves:
        return []
    givers, takers = {giver for giver, _ in moves}, {taker for _, taker in moves}
    if lax or not givers & takers:
        colours = _bipartite(moves)
    else:
        ways = [_exact] if len(moves) <= EXACT_MOVES else [_flipped, _by_circuits]
        colours = min((way(moves) for way in ways), key=lambda each: len(set(each)))
    steps: dict[int, list[int]] = defaultdict(list)
    for position, colour in enumerate(colours):
        steps[colour].append(position)
    return sorted(steps.values(), key=lambda step: -len(step))


# ── colouring ─────────────────────────────────────────────────────────────────────────────────────────────────────


class _Colouring:
    """Colours of edges so far, and for each vertex: the edge of each colour, and the free colours as the bits of a
    number."""

    def __init__(self, edges: Sequence[Edge], colours: int) -> None:
        self.edges = edges
        self.colours: list[int | None] = [None] * len(edges)
        self._at: dict[int, dict[int, int]] = defaultdict(dict)
        self._free: dict[int, int] = {vertex: (1 << colours) - 1 for edge in edges for vertex in edge}
        self.count = colours

    def grow(self) -> None:
        """Allow one more colour."""
        for vertex in self._free:
            self._free[vertex] |= 1 << self.count
        self.count += 1

    def free(self, partition: int) -> int:
        """The colours that no edge at a partition has."""
        return self._free[partition]

    def paint(self, edge: int, colour: int | None) -> None:
        """Give an edge a colour that is free at both ends, or none."""
        before = self.colours[edge]
        for vertex in self.edges[edge]:
            if before is not None:
                del self._at[vertex][before]
                self._free[vertex] |= 1 << before
            if colour is not None:
                self._at[vertex][colour] = edge
                self._free[vertex] &= ~(1 << colour)
        self.colours[edge] = colour

    def path(self, start: int, first: int, second: int) -> tuple[list[int], int]:
        """The edges of the path from ``start`` whose colours are ``first``, ``second``, ``first``, …, and its end."""
        found: list[int] = []
        vertex, colour = start, first
        while (edge := self._at[vertex].get(colour)) is not None:
            found.append(edge)
            one, other = self.edges[edge]
            vertex = other if vertex == one else one
            colour = second if colour == first else first
        return found, vertex

    def flip(self, path: Sequence[int], first: int, second: int) -> None:
        """Exchange two colours along a path."""
        wanted = [second if self.colours[edge] == first else first for edge in path]
        for edge in path:
            self.paint(edge, None)
        for edge, colour in zip(path, wanted, strict=True):
            self.paint(edge, colour)

    def result(self) -> list[int]:
        """The colours, once all edges have one."""
        return [colour for colour in self.colours if colour is not None]


def _bits(number: int) -> Iterator[int]:
    while number:
        lowest = number & -number
        yield lowest.bit_length() - 1
        number ^= lowest


def _lowest(number: int) -> int:
    return (number & -number).bit_length() - 1


def _bipartite(edges: Sequence[Edge]) -> list[int]:
    """Colours such that no two edges with the same tail, and no two with the same head, have the same one.

    Tails and heads count as different vertices. An edge whose ends have no free colour in common gets one by flipping a
    path from its head, which cannot lead to its tail: it would get there by an edge of a colour that is free there.
    """
    both = [(2 * tail, 2 * head + 1) for tail, head in edges]
    colouring = _Colouring(both, largest_degree(edges, lax=True))
    for number, (tail, head) in enumerate(both):
        common = colouring.free(tail) & colouring.free(head)
        if not common:
            mine, other = _lowest(colouring.free(tail)), _lowest(colouring.free(head))
            path, _ = colouring.path(head, mine, other)
            colouring.flip(path, mine, other)
            common = 1 << mine
        colouring.paint(number, _lowest(common))
    return colouring.result()


def _flipped(edges: Sequence[Edge]) -> list[int]:
    """Colours by flipping paths, as for :func:`_bipartite`; where none can be flipped, with one more colour."""
    colouring = _Colouring(edges, _least(edges))
    for number, (one, other) in enumerate(edges):
        common = colouring.free(one) & colouring.free(other)
        if not common and (mine := _made_free(colouring, one, other)) is not None:
            common = 1 << mine
        if not common:
            colouring.grow()
            common = 1 << (colouring.count - 1)
        colouring.paint(number, _lowest(common))
    return colouring.result()


def _made_free(colouring: _Colouring, one: int, other: int) -> int | None:
    """Flip a path so that a colour is free at both vertices, if there is one; return the colour."""
    for mine in _bits(colouring.free(one)):
        for theirs in _bits(colouring.free(other)):
            path, end = colouring.path(other, mine, theirs)
            if end != one:
                colouring.flip(path, mine, theirs)
                return mine
    return None


def _least(edges: Sequence[Edge]) -> int:
    """A lower bound: three partitions can have one move among them in a step, so triangles may need more steps."""
    counts = Counter((min(edge), max(edge)) for edge in edges)
    vertices = sorted({vertex for edge in edges for vertex in edge})
    triangles = (
        counts[first, second] + counts[first, third] + counts[second, third]
        for position, first in enumerate(vertices)
        for second in vertices[position + 1 :]
        if counts[first, second]
        for third in vertices
        if third > second
    )
    return max(largest_degree(edges), max(triangles, default=0))


def _exact(edges: Sequence[Edge]) -> list[int]:
    """The fewest colours, by trying all. The first edge of each colour is the first that could have it."""
    colours = [0] * len(edges)

    def fits(number: int, limit: int, used: int) -> bool:
        if number == len(edges):
            return True
        taken = {colours[earlier] for earlier in range(number) if set(edges[earlier]) & set(edges[number])}
        for colour in range(min(limit, used + 1)):
            if colour not in taken:
                colours[number] = colour
                if fits(number + 1, limit, max(used, colour + 1)):
                    return True
        return False

    limit = _least(edges)
    while not fits(0, limit, 0):  # as many colours as edges always do
        limit += 1
    return colours


def _by_circuits(edges: Sequence[Edge]) -> list[int]:
    """At most ``3 * ceil(degree / 2)`` colours.

    Directed along its circuits, a graph has at most half of a vertex's edges, rounded up, in each direction. Coloured
    by direction, the edges of one colour are paths and cycles, for which two colours are enough, or three if odd.
    """
    directed = _directed(edges)
    classes: dict[int, list[int]] = defaultdict(list)
    for number, colour in enumerate(_bipartite(directed)):
        classes[colour].append(number)
    result = [0] * len(edges)
    used = 0
    for members in classes.values():
        leaves = {directed[number][0]: number for number in members}
        enters = {directed[number][1]: number for number in members}
        waiting = set(members)
        most = 0
        while waiting:
            # Begin where nothing enters, so that a path is followed from its beginning; else it is a cycle.
            start = next((each for each in waiting if directed[each][0] not in enters), min(waiting))
            chain: list[int] = []
            following: int | None = start
            while following is not None and following in waiting:
                waiting.discard(following)
                chain.append(following)
                following = leaves.get(directed[following][1])
            is_odd_cycle = following == start and len(chain) % 2 == 1
            for position, each in enumerate(chain):
                result[each] = used + position % 2
            if is_odd_cycle:
                result[chain[-1]] = used + 2
            most = max(most, 3 if is_odd_cycle else min(2, len(chain)))
        used += most
    return result


def _directed(edges: Sequence[Edge]) -> list[Edge]:
    """The same edges, each in one direction, such that at a vertex both directions differ by one at most."""
    nobody = min(vertex for edge in edges for vertex in edge) - 1
    odd = [vertex for vertex, degree in Counter(vertex for edge in edges for vertex in edge).items() if degree % 2]
    all_edges = [*edges, *((nobody, vertex) for vertex in odd)]
    at: dict[int, list[int]] = defaultdict(list)
    for number, (one, other) in enumerate(all_edges):
        at[one].append(number)
        at[other].append(number)
    result: list[Edge | None] = [None] * len(all_edges)
    for start in list(at):
        vertex = start
        while at[vertex]:
            number = at[vertex].pop()
            if result[number] is not None:
                continue
            one, other = all_edges[number]
            beyond = other if vertex == one else one
            result[number] = vertex, beyond
            vertex = beyond
    return [edge for edge in result[: len(edges)] if edge is not None]
