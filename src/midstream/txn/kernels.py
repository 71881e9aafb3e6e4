"""Building blocks of compiled code: compiler options, arithmetic with defined edge cases, hash maps, logs, atomics.

The engine's threads are ordinary Python threads inside kernels that release the GIL (``nogil``). numba's own threads do
not survive the fork with which Spark starts its Python workers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from midstream.errors import SetupError

try:
    import numba
    from numba import types
    from numba.core import cgutils
    from numba.extending import intrinsic as _intrinsic
except ImportError as missing:  # pragma: no cover  # the extra is part of every development environment
    raise SetupError("transactions need numba; install it with: pip install 'midstream[txn]'") from missing

__all__ = ["OPTIONS", "compiled", "fetch_add", "load_acquire", "pause", "store_release"]

F = TypeVar("F", bound=Callable[..., Any])

intrinsic: Callable[[Callable[..., Any]], Callable[..., Any]] = (
    _intrinsic  # its type hints describe the decorated function, not the result
)
OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy"}
"""Division by zero has numpy's results; other threads can run at the same time."""

SMALLEST = -(2**63)
LARGEST = 2**63 - 1


def compiled(function: F) -> F:
    """Compile a function on its first call, and cache the result on disk."""
    result: F = numba.njit(cache=True, **OPTIONS)(function)
    return result


# ── arithmetic with defined edge cases: see expressions.py ────────────────────────────────────────────────────────


@compiled
def floordiv(a: int, b: int) -> int:
    """``a // b``; 0 if ``b`` is zero. -2**63 // -1, which traps on most processors, wraps around."""
    if b == 0:
        return a * 0
    if b == -1:
        return int(np.int64(np.uint64(0) - np.uint64(a)))
    return a // b


@compiled
def modulo(a: int, b: int) -> int:
    """``a % b``; 0 if ``b`` is zero."""
    if b == 0 or b == -1:
        return a * 0
    return a % b


@compiled
def floor(a: float) -> int:
    """The largest whole number that is not above ``a``."""
    if a != a:
        return 0
    if a >= 9223372036854775808.0:
        return LARGEST
    if a <= -9223372036854775808.0:
        return SMALLEST
    whole = int(a)  # towards zero
    return whole - 1 if whole > a else whole


# ── keys that are computed at run time: an open hash map from key to id ───────────────────────────────────────────


@compiled
def scramble(key: int) -> int:
    """Scramble the bits of a key, so that neighbouring keys do not collide."""
    x = np.uint64(key)
    x ^= x >> np.uint64(32)
    x *= np.uint64(0x9E3779B97F4A7C15)
    x ^= x >> np.uint64(29)
    return int(np.int64(x & np.uint64(0x7FFFFFFFFFFFFFFF)))


@compiled
def find_or_add(key: int, direct: Any, slots: Any, ids: Any, keys: Any, count: Any) -> int:
    """The id of a key; a new key gets the next id. ``keys`` lists keys by id, ``count[0]`` is their number.

    The ids of small keys are in ``direct``, indexed by key; the others are in the hash map ``slots`` and ``ids``.
    """
    new = count[0]
    if 0 <= key < len(direct):
        if direct[key] >= 0:
            return int(direct[key])
        direct[key] = new
    else:
        mask = len(slots) - 1
        at = scramble(key) & mask
        while ids[at] >= 0:
            if slots[at] == key:
                return int(ids[at])
            at = (at + 1) & mask
        slots[at] = key
        ids[at] = new
    keys[new] = key
    count[0] = new + 1
    return int(new)


@compiled
def ends(column: Any, rows: Any, begin: int) -> Any:
    """The smallest and the largest key in some rows of a column, starting with the row at ``begin``."""
    low = high = column[rows[begin]]
    for y in range(begin, len(rows)):
        low = min(low, column[rows[y]])
        high = max(high, column[rows[y]])
    return low, high


@compiled
def number_keys(
    column: Any,
    rows: Any,
    begin: int,
    width: int,
    slot: int,
    found: Any,
    direct: Any,
    slots: Any,
    ids: Any,
    keys: Any,
    count: Any,
) -> int:
    """The ids of the keys in some rows of a column, as :func:`find_or_add` assigns them.

    The id of row x goes to ``found[x * width + slot]``. Returns the number of rows, or the place in ``rows`` where
    there was no room for a new key; the caller makes room and continues there. It is in this file, because numba only
    notices changes in the file of the function itself.
    """
    small, room = np.uint64(len(direct)), len(keys)
    mask = len(slots) - 1
    new = count[0]
    for y in range(begin, len(rows)):
        x = np.uint64(rows[np.uint64(y)])  # unsigned subscripts: see codegen.py
        key = column[x]
        if new == room:
            count[0] = new
            return y
        small_key = np.uint64(key)
        if small_key < small:
            # No branch on whether the key is new, since it could not be predicted. All bits of ``fresh`` are set if it
            # is.
            number = np.int64(direct[small_key])
            fresh = number >> 63
            number = (number & ~fresh) | (new & fresh)
            direct[small_key] = number
            keys[np.uint64(new)] = key
            new -= fresh
        else:
            at = scramble(key) & mask
            while ids[at] >= 0 and slots[at] != key:
                at = (at + 1) & mask
            number = np.int64(ids[at])
            if number < 0:
                if 2 * new >= mask:  # searching a full map would never end
                    count[0] = new
                    return y
                slots[at] = key
                ids[at] = number = new
                keys[new] = key
                new += 1
        found[x * np.uint64(width) + np.uint64(slot)] = number
    count[0] = new
    return len(rows)


@compiled
def look_up(keys: Any, direct: Any, found: Any) -> bool:
    """The ids of keys if all of them are small and known; otherwise False, and ``found`` is undefined."""
    small = np.uint64(len(direct))
    any_bits = np.int32(0)
    for x in range(len(keys)):
        key = np.uint64(keys[x])
        if key >= small:
            return False
        number = direct[key]
        any_bits |= number
        found[x] = number
    return bool(any_bits >= 0)


@compiled
def measure_from(column: Any, rows: Any, low: int, width: int, slot: int, found: Any, seen: Any) -> bool:
    """The distance of the keys in some rows of a column from ``low``; False as soon as one is not within ``seen``.

    The distance of row x goes to ``found[x * width + slot]``, and is marked in ``seen``.
    """
    size = np.uint64(len(seen))
    for y in range(np.uint64(len(rows))):
        x = np.uint64(rows[y])
        distance = np.uint64(column[x]) - np.uint64(low)
        if distance >= size:
            return False
        seen[distance] = True
        found[x * np.uint64(width) + np.uint64(slot)] = distance
    return True


@compiled
def rows_of(kinds: Any, kind: int) -> Any:
    """The rows of one kind."""
    rows = np.empty(len(kinds), np.int64)
    count = 0
    for x in range(len(kinds)):
        rows[count] = x
        count += kinds[x] == kind
    return rows[:count]


# ── the log of a table that windows read: for each key, the writes to it, newest first ────────────────────────────


@compiled
def log_entry(
    key: int, i: int, at: int, base: int, stride: int, timestamp: int, head: Any, older: Any, times: Any, newest: Any
) -> int:
    """The entry for a write of transaction ``i``: the one at ``at``, or that of its earlier write to the same key."""
    last = head[key]
    if last >= base and (last - base) // stride == i:
        return int(last)
    times[at] = timestamp
    older[at] = last
    newest[at] = max(timestamp, newest[last]) if last >= 0 else timestamp
    head[key] = at
    return at


@compiled
def window_total(at: int, low: int, high: int, older: Any, times: Any, newest: Any, values: Any, zero: Any) -> Any:
    """Sum and number of the values with ``low < time <= high``."""
    total = zero
    count = 0
    while at >= 0 and newest[at] > low:
        if low < times[at] <= high:
            total += values[at]
            count += 1
        at = older[at]
    return total, count


@compiled
def window_best(
    at: int, low: int, high: int, older: Any, times: Any, newest: Any, values: Any, largest: bool, default: Any
) -> Any:
    """The smallest or largest of the values with ``low < time <= high``."""
    best = default
    empty = True
    while at >= 0 and newest[at] > low:
        if low < times[at] <= high:
            value = values[at]
            if empty or (value > best if largest else value < best):
                best = value
                empty = False
        at = older[at]
    return best


@compiled
def versioned_window_total(
    version: int,
    at: int,
    previous: Any,
    owners: Any,
    clock: Any,
    aborted: Any,
    versions: Any,
    low: int,
    high: int,
    older: Any,
    times: Any,
    newest: Any,
    values: Any,
    zero: Any,
) -> Any:
    """:func:`window_total` when the newest values are versions of transactions that are not settled yet."""
    total = zero
    count = 0
    while version >= 0 and clock[owners[version]] > low:
        if not aborted[owners[version]]:
            total += versions[version]
            count += 1
        version = previous[version]
    while at >= 0 and newest[at] > low:
        if low < times[at] <= high:
            total += values[at]
            count += 1
        at = older[at]
    return total, count


@compiled
def versioned_window_best(
    version: int,
    at: int,
    previous: Any,
    owners: Any,
    clock: Any,
    aborted: Any,
    versions: Any,
    low: int,
    high: int,
    older: Any,
    times: Any,
    newest: Any,
    values: Any,
    largest: bool,
    default: Any,
) -> Any:
    """:func:`window_best` when the newest values are versions of transactions that are not settled yet."""
    best = default
    empty = True
    while version >= 0 and clock[owners[version]] > low:
        if not aborted[owners[version]]:
            value = versions[version]
            if empty or (value > best if largest else value < best):
                best = value
                empty = False
        version = previous[version]
    while at >= 0 and newest[at] > low:
        if low < times[at] <= high:
            value = values[at]
            if empty or (value > best if largest else value < best):
                best = value
                empty = False
        at = older[at]
    return best


# ── atomics ───────────────────────────────────────────────────────────────────────────────────────────────────────


def _pointer(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    array = context.make_array(signature.args[0])(context, builder, args[0])
    pointer: Any = cgutils.get_item_pointer  # not annotated
    return pointer(context, builder, signature.args[0], array, [args[1]], wraparound=False)


@intrinsic
def fetch_add(typing: Any, array: Any, index: Any, value: Any) -> Any:
    """Atomically add to an element of an array of 64-bit numbers; return its previous value."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.atomic_rmw("add", _pointer(context, builder, signature, args), args[2], "seq_cst")

    return types.int64(array, types.intp, types.int64), generate


@intrinsic
def load_acquire(typing: Any, array: Any, index: Any) -> Any:
    """Read an element that another thread writes with :func:`store_release`; its earlier writes are visible, too."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load_atomic(_pointer(context, builder, signature, args), "acquire", 8)

    return types.int64(array, types.intp), generate


@intrinsic
def store_release(typing: Any, array: Any, index: Any, value: Any) -> Any:
    """Write an element for :func:`load_acquire`."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.store_atomic(args[2], _pointer(context, builder, signature, args), "release", 8)
        return context.get_dummy_value()

    return types.void(array, types.intp, types.int64), generate


_give_way = types.ExternalFunction("sched_yield", types.int32())

SPINS = 2000
"""Number of spins before the core is yielded to others: a few microseconds."""


@compiled
def pause(spins: int) -> int:
    """Wait a moment for another thread; return the number of spins so far."""
    if spins >= SPINS:
        _give_way()
        return 0
    return spins + 1
