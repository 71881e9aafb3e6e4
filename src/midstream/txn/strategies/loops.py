"""The loops around transactions and operations: serial, by strata, depth first, from a queue.

These are templates rather than functions to call: :func:`midstream.txn.codegen.adapted` replaces ``*state`` with the
arrays of a program, and ``visit`` with the function that runs one transaction (in place) or one operation (on
versions).

A *unit* is the work that a thread takes at once. Unit u consists of ``members[starts[u]:starts[u + 1]]``, run in that
order. Several threads run a loop at the same time; ``failed`` says that one of them ended with an exception, so that
the others stop waiting for it.
"""

from __future__ import annotations

from typing import Any

from midstream.txn.kernels import fetch_add, load_acquire, pause, store_release

__all__ = ["by_strata", "depth_first", "from_queue", "in_order", "repair"]


def visit(member: int, *state: Any) -> None:
    """Placeholder for the function that runs a member."""
    raise NotImplementedError


def in_order(low: int, high: int, members: Any, *state: Any) -> None:
    """Visit members in order."""
    for x in range(low, high):
        visit(members[x], *state)


def by_strata(
    thread: int,
    threads: int,
    strata: Any,
    units: Any,
    arrived: Any,
    failed: Any,
    starts: Any,
    members: Any,
    *state: Any,
) -> None:
    """Stratum by stratum, each divided among the threads; all threads finish a stratum before any starts the next."""
    for level in range(len(strata) - 1):
        low, width = strata[level], strata[level + 1] - strata[level]
        for x in range(low + width * thread // threads, low + width * (thread + 1) // threads):
            for y in range(starts[units[x]], starts[units[x] + 1]):
                visit(members[y], *state)
        if threads > 1:
            fetch_add(arrived, 0, 1)
            spins = 0
            while load_acquire(arrived, 0) < threads * (level + 1):
                if load_acquire(failed, 0) != 0:
                    return
                spins = pause(spins)


def depth_first(
    mine: Any, before: Any, needed: Any, done: Any, failed: Any, starts: Any, members: Any, *state: Any
) -> None:
    """A thread's own units, in dependency order; it waits only for the units that a unit needs.

    Unit u needs ``needed[before[u]:before[u + 1]]``. There is no deadlock, because all threads follow one common order
    of the units.
    """
    for x in range(len(mine)):
        unit = mine[x]
        for y in range(before[unit], before[unit + 1]):
            spins = 0
            while load_acquire(done, needed[y]) == 0:
                if load_acquire(failed, 0) != 0:
                    return
                spins = pause(spins)
        for y in range(starts[unit], starts[unit + 1]):
            visit(members[y], *state)
        store_release(done, unit, 1)


def from_queue(
    queue: Any,
    ends: Any,
    missing: Any,
    after: Any,
    dependents: Any,
    failed: Any,
    starts: Any,
    members: Any,
    *state: Any,
) -> None:
    """Whichever unit is ready. A finished unit decrements the counts of its dependents; a unit with count 0 is queued.

    The queue has a slot for every unit, so slots are handed out by counting: ``ends`` are the next to take and the next
    to fill. A thread that takes a slot before it is filled waits for it. The dependencies have no cycle, so some thread
    will fill it.
    """
    total = len(queue)
    while True:
        place = fetch_add(ends, 0, 1)
        if place >= total:
            return
        spins = 0
        unit = load_acquire(queue, place)
        while unit < 0:
            if load_acquire(failed, 0) != 0:
                return
            spins = pause(spins)
            unit = load_acquire(queue, place)
        for y in range(starts[unit], starts[unit + 1]):
            visit(members[y], *state)
        for y in range(after[unit], after[unit + 1]):
            if fetch_add(missing, dependents[y], -1) == 1:
                store_release(queue, fetch_add(ends, 1, 1), dependents[y])


def repair(
    transactions: Any,
    of_kind: Any,
    slots_from: Any,
    slots: Any,
    sources: Any,
    operations_from: Any,
    checks: Any,
    operations: Any,
    windows: Any,
    stopped: Any,
    found: Any,
    changed: Any,
    *state: Any,
) -> int:
    """Lazy aborts: undo the writes of transactions whose checks failed, and redo their readers.

    One pass in order is enough: whether a transaction aborts depends only on earlier ones, and these are final by then.
    Returns the number of transactions run again.
    """
    redone = 0
    for x in range(len(transactions)):
        i = transactions[x]
        kind = of_kind[i]
        first = operations_from[i]
        dirty = redone > 0 and windows[kind]
        for y in range(slots_from[i], slots_from[i] + slots[kind]):
            dirty = dirty or (sources[y] >= 0 and changed[sources[y]] != 0)
        if dirty:
            for o in range(first, first + checks[kind]):
                visit(o, *state)
        failed = 0
        for o in range(first, first + checks[kind]):
            failed = 1 if found[o] == 2 else failed
        if dirty or failed != stopped[i]:
            redone += 1
            stopped[i] = failed
            for o in range(first + checks[kind], first + operations[kind]):
                visit(o, *state)
                changed[o] = 1
    return redone
