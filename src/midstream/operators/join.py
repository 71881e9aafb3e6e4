"""join: pairs of rows of two keyed streams with equal keys, near each other in event time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pyarrow as pa

from midstream.data.schema import columns_of
from midstream.engine.parts import Parts, TaskSpec
from midstream.engine.steps import AtWork
from midstream.errors import SchemaError
from midstream.flow.model import Operator
from midstream.flow.spec import ERRORS, ERRORS_RIGHT, LATE, LATE_RIGHT, Contract, How, InputChange, Spec, layout_text
from midstream.flow.windows import Window
from midstream.operators.join_step import join_at_work
from midstream.state.contents import in_namespace, keys_of
from midstream.state.key_arrays import decode_keys, split_timers
from midstream.state.keys import Namespace


@dataclass(frozen=True)
class Join(TaskSpec):
    """Pairs of rows of two keyed streams with equal keys, in one window or at most ``within_us`` apart.

    ``left_keys`` and ``right_keys`` correspond by position; ``left_time`` and ``right_time`` name the event times.
    ``unique`` is the user's promise that at most one row comes out for each row of the *source*, as of a self-join on
    the primary key, so that a change of what stands behind it may begin there. Unlike ``one_to_one`` it says nothing of
    the operator's own inputs, and nothing checks it while the flow runs.
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

    @property
    def keyed_by(self) -> tuple[str, ...]:
        """The key columns as the result has them."""
        return self.left_keys

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
        """See the class."""
        return self.unique

    @property
    def blocks(self) -> bool:
        """A left join gives rows without a partner when none can come any more."""
        return self.how is How.LEFT

    def gives_many(self, branch: str) -> bool:
        """A late row comes out as it came."""
        return not branch

    def check_input(self, change: InputChange) -> None:
        """Rows are kept whole."""
        raise SchemaError(
            f"{change}. A join keeps whole rows, so they cannot change; keep the columns, or give the new ones to an "
            f"operator behind the join"
        )

    def derived(
        self, inputs: Sequence[pa.Schema], schema: pa.Schema, payload: Any, what: str
    ) -> tuple[Spec, pa.Schema]:
        """The same columns, as its inputs have the same."""
        return self, schema

    def at_work(self, operator: Operator, parts: Parts) -> AtWork:
        """See :func:`join_at_work`."""
        left, right = parts.takes(operator)
        return join_at_work(operator, self, (left, right), parts.state(operator), parts.times)

    def state_layout(self, takes: Sequence[pa.Schema]) -> str:
        """Another promise changes no byte of what it keeps."""
        return layout_text(replace(self, unique=False), takes)

    def shown_state(self, operator: Operator, takes: Sequence[pa.Schema], rows: pa.Table) -> pa.Table:
        """How many bytes of rows it keeps of each key and time."""
        schema = columns_of(takes[0], self.left_keys)
        sides = {Namespace.JOIN_LEFT: "left", Namespace.JOIN_RIGHT: "right"}
        parts = []
        for namespace, side in sides.items():
            found = in_namespace(rows, namespace)
            times, keys = split_timers(keys_of(found))
            sizes = [len(value) for value in found["value"].to_pylist()]
            columns = [
                *decode_keys(keys, schema),
                pa.array([side] * len(keys), pa.string()),
                pa.array(times).view(pa.timestamp("us", "UTC")),
                pa.array(sizes, pa.int64()),
            ]
            added = [("side", pa.string()), ("time", pa.timestamp("us", "UTC")), ("bytes", pa.int64())]
            parts.append(pa.Table.from_arrays(columns, schema=pa.schema([*schema, *(pa.field(*f) for f in added)])))
        return pa.concat_tables(parts)
