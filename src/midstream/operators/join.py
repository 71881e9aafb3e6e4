"""join: pairs rows of two keyed streams with equal keys and event times close to each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import pyarrow as pa

from midstream.data.durations import duration
from midstream.data.schema import columns_of, joined_schema, type_name
from midstream.engine.joining.division import SharedBins
from midstream.engine.joining.times import Nearness
from midstream.engine.parts import Parts, TaskSpec
from midstream.engine.steps import OperatorInTask
from midstream.errors import FlowError, SchemaError
from midstream.flow.model import Operator
from midstream.flow.spec import ERRORS, ERRORS_RIGHT, LATE, LATE_RIGHT, Contract, How, InputChange, Spec, layout_text
from midstream.flow.validate import check_name
from midstream.flow.windows import Tumbling, Window
from midstream.operators.join_step import instantiate_join
from midstream.operators.rows import KeyedRows
from midstream.state.contents import in_namespace, keys_of
from midstream.state.key_arrays import decode_keys, split_timers
from midstream.state.keys import Namespace

if TYPE_CHECKING:
    from midstream.operators.stream import KeyedStream, Stream


@dataclass(frozen=True)
class Join(TaskSpec):
    """Pairs rows of two keyed streams with equal keys, in one window or at most ``within_us`` apart; if ``after_us`` is
    given, the right row is at most ``within_us`` before the left one and at most ``after_us`` after it.

    ``left_keys`` and ``right_keys`` correspond by position; ``left_time`` and ``right_time`` name the event times.
    ``unique`` is the user's promise that the join emits at most one row for each row of the *source*, as a self-join on
    the primary key does, so that a change downstream of the join may begin there. Unlike ``one_to_one`` it promises
    nothing about the operator's own inputs, and nothing checks it while the flow runs.
    """

    kind: ClassVar[str] = "join"
    is_stateful: ClassVar[bool] = True
    error_branches: ClassVar[tuple[str, ...]] = (ERRORS, ERRORS_RIGHT)

    left_keys: tuple[str, ...]
    right_keys: tuple[str, ...]
    left_time: str
    right_time: str
    how: How
    window: Window | None = None
    within_us: int | None = None
    unique: bool = False
    after_us: int | None = None

    @property
    def keyed_by(self) -> tuple[str, ...]:
        """The key columns of the result."""
        return self.left_keys

    @property
    def keys_by_input(self) -> tuple[tuple[str, ...], ...]:
        """Each side has its own names for the key."""
        return (self.left_keys, self.right_keys)

    @property
    def late_branches(self) -> tuple[str, ...]:
        """One for each side."""
        return (LATE, LATE_RIGHT)

    @property
    def contract(self) -> Contract:
        """A row may have many partners."""
        return Contract.ONE_TO_MANY

    @property
    def is_unique(self) -> bool:
        """Whether the user promised it."""
        return self.unique

    @property
    def blocks(self) -> bool:
        """An outer join emits rows without a partner at the end, once none can arrive any more."""
        return self.how is not How.INNER

    @property
    def copyable_inputs(self) -> tuple[int, ...]:
        """Those whose rows are not kept: whether a row that is kept has a partner must be known in one task."""
        return tuple(number for number, kept in enumerate((self.how.keeps_left, self.how.keeps_right)) if not kept)

    @property
    def holds_back(self) -> bool:
        """Rows without a partner so far."""
        return self.how is not How.INNER

    def gives_many(self, branch: str) -> bool:
        """A row may have many partners, but a late row leaves once."""
        return not branch

    def check_input(self, change: InputChange) -> None:
        """State holds whole rows, so their columns must stay the same."""
        raise SchemaError(
            f"{change}. A join stores whole rows, so its columns cannot change; keep the columns, or add the new ones "
            f"in an operator after the join"
        )

    def derived(
        self, inputs: Sequence[pa.Schema], schema: pa.Schema, payload: Any, what: str
    ) -> tuple[Spec, pa.Schema]:
        """The same columns, because the inputs cannot change."""
        return self, schema

    def instantiate(self, operator: Operator, parts: Parts) -> OperatorInTask:
        """See :func:`instantiate_join`."""
        left, right = parts.takes(operator)
        state, name = parts.state(operator), operator.name
        shared = SharedBins(
            state,
            columns_of(left, self.left_keys),
            [each for each in parts.divided if each.join == name],
            [each for each in parts.united if each.join == name],
            None if parts.elsewhere is None else partial(parts.elsewhere, name),
        )
        return instantiate_join(operator, self, (left, right), state, parts.times, shared)

    def state_layout(self, takes: Sequence[pa.Schema]) -> str:
        """The promise of uniqueness does not affect the stored bytes."""
        return layout_text(replace(self, unique=False), takes)

    def shown_state(self, operator: Operator, takes: Sequence[pa.Schema], rows: pa.Table) -> pa.Table:
        """The number of bytes stored for each side, key and time."""
        near = Nearness.of(self.window, self.within_us, self.after_us)
        schema = columns_of(takes[0], self.left_keys)
        sides = {Namespace.JOIN_LEFT: "left", Namespace.JOIN_RIGHT: "right"}
        parts = []
        for namespace, side in sides.items():
            found = in_namespace(rows, namespace)
            times, keys = split_timers(keys_of(found))
            times = times - near.shift if namespace is Namespace.JOIN_LEFT else times
            sizes = [len(value) for value in found["value"].to_pylist()]
            columns = [
                *decode_keys(keys, schema),
                pa.array([side] * len(keys), pa.string()),
                pa.array(near.moments(times)).view(pa.timestamp("us", "UTC")),
                pa.array(sizes, pa.int64()),
            ]
            added = [("side", pa.string()), ("time", pa.timestamp("us", "UTC")), ("bytes", pa.int64())]
            parts.append(pa.Table.from_arrays(columns, schema=pa.schema([*schema, *(pa.field(*f) for f in added)])))
        return pa.concat_tables(parts)


class JoinMethods(KeyedRows):
    """Add a join to a keyed stream."""

    def join(
        self,
        name: str,
        other: KeyedStream,
        *,
        how: str = "inner",
        window: Tumbling | None = None,
        within: str | tuple[str, str] | None = None,
        left_time: str | None = None,
        right_time: str | None = None,
        unique: bool = False,
        on_error: str = "fail",
    ) -> Stream:
        """Pair rows of this keyed stream and another that have equal keys and event times close to each other.

        The result has all columns of this stream, then those of the other without its key columns. Give either
        ``window=tumbling(…)``: both rows are in one window; or ``within="10 seconds"``: the rows are at most that far
        apart; or ``within=("0 seconds", "1 hour")``: the other's row is at most the first before this one's, and at
        most the second after it. Rows are kept as long as the watermark allows for a partner; rows that arrive later
        leave at ``.late("left")`` and ``.late("right")``.

        :param how: ``"left"`` also emits each row of this stream that has no partner, with nulls, once none can arrive
            any more; ``"right"`` does so for the other stream, ``"full"`` for both. A row of the other stream then
            has its key in the key columns, and nulls in all other columns of this stream, its event time included.
        :param unique: promises at most one row for each row of the *source*, as a self-join on the primary key yields;
            a change downstream of the join may then begin there, instead of where the two sides part. Not checked while
            the flow runs; the auditor detects a broken promise.
        :param on_error: with ``"branch"``, rows whose key is null or too long, or whose time is null, leave at
            ``.errors("left")`` and ``.errors("right")``.

        >>> from datetime import UTC, datetime
        >>> from midstream import Flow, ListSource, MemorySink
        >>> from midstream.testing import run_local
        >>> flow, out = Flow("orders"), MemorySink()
        >>> rows = [{"id": 1, "eur": 3, "at": datetime(2026, 1, 1, tzinfo=UTC)}]
        >>> orders = flow.source("orders", ListSource([rows], "id int, eur int, at timestamp", event_time="at"))
        >>> cents = orders.map("cents", lambda row: {"id": row["id"], "cents": 100 * row["eur"], "seen": row["at"]},
        ...                    returns="id int, cents int, seen timestamp")
        >>> orders.key_by("left", "id").join("both", cents.key_by("right", "id"), within="0 seconds",
        ...                                  right_time="seen", unique=True).sink("out", out)
        >>> _ = run_local(flow)
        >>> [(row["id"], row["eur"], row["cents"]) for row in out.rows]
        [(1, 3, 300)]
        """
        what = f"join {check_name(name, 'join')!r}"
        self._check_partner(other, what)
        if how not in list(How):
            raise FlowError(f"{what}: how={how!r} is not known; allowed: {', '.join(How)}")
        if (window is None) == (within is None):
            raise FlowError(f"{what}: give either window=tumbling(…) or within='10 seconds'")
        before_us, after_us = _distances(within, what)
        if window is not None and not isinstance(window, Tumbling):
            raise FlowError(f"{what}: a join takes tumbling windows, found {window!r:.60}; or use within=")
        spec = Join(
            left_keys=self.keys,
            right_keys=other.keys,
            left_time=self._time(left_time, f"{what}, left"),
            right_time=other._time(right_time, f"{what}, right"),
            how=How(how),
            window=window,
            within_us=before_us,
            unique=unique,
            after_us=after_us,
        )
        if (self.schema.field(spec.left_time).type.tz is None) != (other.schema.field(spec.right_time).type.tz is None):
            raise SchemaError(f"{what}: one event time has a time zone and the other has none; cast one of them first")
        schema = joined_schema(
            self.schema,
            other.schema,
            dict(zip(other.keys, self.keys, strict=True)),
            what,
            keeps_left=spec.how.keeps_left,
            keeps_right=spec.how.keeps_right,
        )
        return self._flow._add(name, spec, (self._port, other._port), schema, on_error=on_error)

    def _check_partner(self, other: KeyedStream, what: str) -> None:
        if not isinstance(other, KeyedRows):
            raise FlowError(
                f"{what}: the other side must be a keyed stream, found {type(other).__name__}; use key_by first"
            )
        if other._flow is not self._flow:
            raise FlowError(f"{what}: {str(other._port)!r} belongs to another flow; streams join within one flow")
        if len(other.keys) != len(self.keys):
            raise FlowError(
                f"{what}: the left side is keyed by ({', '.join(self.keys)}), the right one by "
                f"({', '.join(other.keys)}); both must have the same number of columns"
            )
        for mine, theirs in zip(self.keys, other.keys, strict=True):
            left, right = self.schema.field(mine).type, other.schema.field(theirs).type
            if not left.equals(right):
                raise SchemaError(
                    f"{what}: the left {mine!r} is {type_name(left)} but the right {theirs!r} is {type_name(right)}; "
                    f"keys must have the same type"
                )


def _distances(within: Any, what: str) -> tuple[int | None, int | None]:
    """The largest distances of the right row before and after the left one; the second is None if both are the same."""
    if within is None:
        return None, None
    if not isinstance(within, tuple):
        return duration(within, f"{what}: within", zero=True), None
    if len(within) != 2:
        raise FlowError(
            f"{what}: within={within!r:.80} has {len(within)} lengths of time; give one for both directions, or two: "
            f"how long before and how long after the left row the right one may be"
        )
    before, after = (duration(each, f"{what}: within", zero=True) for each in within)
    if (before + after) % 2:
        raise FlowError(f"{what}: within={within!r} adds up to an odd number of microseconds; add one to either")
    return before, after if after != before else None
