"""The step of a transact: runs the rows of an epoch as one batch of transactions over shared tables.

Rows wait for the last row of the epoch, because only then their order is known. They are emitted in the order of
arrival. The tables have the changes of the transactions once the epoch is committed, and not before.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from midstream.data.times import EpochTimes
from midstream.engine.aggregation.blocks import BLOCK
from midstream.engine.aggregation.runs import order_by
from midstream.engine.bad_rows import ErrorsBranch, Screen, by_halves, reason_of, without
from midstream.engine.failure import USER_ERRORS, failed, row_at
from midstream.engine.keyed_rows import checked_times, found_keys, refuse_nulls
from midstream.engine.steps import ONLY, OperatorInTask
from midstream.errors import OperatorFailed, SchemaError
from midstream.flow.model import Operator
from midstream.flow.spec import LATE
from midstream.flow.transactions import Transaction
from midstream.flow.transactions.agreement import returned_by
from midstream.ids import Revision
from midstream.operators.transact_binding import traced
from midstream.state.keys import Namespace
from midstream.state.task import TaskState

if TYPE_CHECKING:
    from midstream.operators.transact import Transact
    from midstream.txn import Engine, Result

__all__ = ["engine_of", "instantiate_transact"]

_log = logging.getLogger("midstream")

Array = npt.NDArray[Any]


def engine_of(operator: Operator, spec: Transact, transactions: Sequence[Transaction], takes: pa.Schema) -> Engine:
    """The engine of an operator's transactions. Domains share a machine's cores; a single domain uses them all."""
    # Imported here, because numba takes half a second to import, and only flows with transactions need it.
    from midstream.txn import Engine, Program
    from midstream.txn.calibration import load_calibration

    types = traced(transactions, takes, f"transact {operator.name!r}")
    threads = None if spec.domain is None else 1
    try:
        calibration = load_calibration()
    except SchemaError as error:  # calibration affects only speed, so no job should fail because of it
        _log.warning("%s; prices of a common machine are assumed", error)
        calibration = None
    return Engine(Program.of(*types), threads=threads, calibration=calibration)


def instantiate_transact(
    operator: Operator, spec: Transact, engine: Engine, state: TaskState, times: EpochTimes, revision: Revision
) -> OperatorInTask:
    """Build a transact in a task."""
    form = _TransactStep(operator, spec, engine, state, times, revision)
    return OperatorInTask((form.take,), form.finish, note=form.note)


class _TransactStep:
    def __init__(
        self,
        operator: Operator,
        spec: Transact,
        engine: Engine,
        state: TaskState,
        times: EpochTimes,
        revision: Revision,
    ) -> None:
        self._operator = operator
        self._spec = spec
        self._engine = engine
        self._state = state
        self._times = times
        self._revision = revision
        self._errors_branch = ErrorsBranch(operator)
        timed = (spec.order_by,) if spec.timed else ()
        present = {spec.order_by: "what rows are ordered by"}
        self._screen = Screen(self._errors_branch, spec.keyed_by, timed, present)
        self._waiting: list[pa.RecordBatch] = []
        self._explanations: dict[str, int] = {}

    def take(self, batch: pa.RecordBatch) -> Mapping[str, pa.RecordBatch]:
        """Keep a slice for the end; emits late rows and bad rows at once."""
        batch, bad = self._screened(batch)
        refuse_nulls(self._operator, batch, [self._spec.order_by], "what rows are ordered by")
        late = self._late(batch)
        if late is None:
            self._waiting.append(batch)
            return bad
        if not late.all():
            self._waiting.append(batch.filter(pa.array(~late)))
        return {LATE: batch.filter(pa.array(late)), **bad}

    def _screened(self, batch: pa.RecordBatch) -> tuple[pa.RecordBatch, Mapping[str, pa.RecordBatch]]:
        """The rows that can trigger a transaction, and the bad rows."""
        reasons = self._screen.reasons(batch)
        if self._screen.is_on and self._spec.which is not None:
            unknown = self._found(batch).is_null().to_numpy(zero_copy_only=False)
            for place in np.flatnonzero(unknown).tolist():
                reasons.setdefault(place, reason_of(self._unknown(batch, place)))
        return without(batch, reasons), self._errors_branch.rows(batch, reasons)

    def finish(self) -> Iterator[Mapping[str, pa.RecordBatch]]:
        """Run all transactions, one domain after the other, and emit the outcome of each row."""
        waiting, self._waiting = self._waiting, []
        for domain, members in self._domains(waiting):
            if self._screen.is_on:
                yield from self._run_tolerantly(domain, pa.concat_batches(members))
                continue
            for outcome in self._run(domain, members):
                yield {ONLY: outcome}

    def note(self) -> str:
        """The strategies that ran the batches of this epoch, with the reasons."""
        return "; ".join(
            text if count == 1 else f"{text} ({count} domains)" for text, count in self._explanations.items()
        )

    def _late(self, batch: pa.RecordBatch) -> npt.NDArray[np.bool_] | None:
        limit = self._times.late_before
        if not self._spec.timed or limit is None:
            return None
        late: npt.NDArray[np.bool_] = checked_times(self._operator, batch, self._spec.order_by) < limit
        return late if late.any() else None

    def _domains(self, waiting: list[pa.RecordBatch]) -> Iterator[tuple[bytes, list[pa.RecordBatch]]]:
        """The stored key of each domain, and its rows in the order of arrival."""
        if not waiting:
            return
        if self._spec.domain is None:
            yield self._state.space.prefix(0, Namespace.VALUE), waiting  # the only domain has an empty key
            return
        rows = pa.concat_batches(waiting)
        found = found_keys(
            self._operator, rows, self._spec.keyed_by, f"transact {self._operator.name!r}", self._state.space
        )
        order = order_by(found.group_of_row, len(found.stored))
        ends = np.cumsum(np.bincount(found.group_of_row, minlength=len(found.stored))).tolist()
        together = rows.take(pa.array(order))
        for domain, start, end in zip(found.stored.to_pylist(), [0, *ends], ends, strict=False):
            yield domain, [together.slice(at, min(BLOCK, end - at)) for at in range(start, end, BLOCK)]

    def _run(self, domain: bytes, members: list[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Run the rows of a domain. Rows stay in the batches they came in: only the columns needed are concatenated."""
        try:
            added = self._executed(domain, members, self._forget())
        except OperatorFailed:
            raise
        except USER_ERRORS as error:  # from the user's functions in t.call
            raise failed(self._operator.name, error, None) from error
        start = 0
        for rows in members:
            new = [column.slice(start, rows.num_rows) for column in added]
            yield pa.RecordBatch.from_arrays([*rows.columns, *new], schema=self._operator.schema)
            start += rows.num_rows

    def _executed(
        self, domain: bytes, members: Sequence[pa.RecordBatch], forget: Mapping[str, int | None]
    ) -> list[pa.Array]:
        """Run transactions, write their tables, and return the columns that they add to their rows.

        Errors of the user's functions propagate, and then nothing has changed.
        """
        from midstream.engine.tables import StoredTables
        from midstream.txn import Batch

        program = self._engine.program
        tables = StoredTables(self._state, domain, self._revision, f"transact {self._operator.name!r}")
        wanted = dict.fromkeys([*program.columns, self._spec.order_by])
        columns = {name: pa.chunked_array([rows.column(name) for rows in members]) for name in wanted}
        kinds = None if self._spec.which is None else np.concatenate([self._kinds(rows) for rows in members])
        result = self._engine.execute(Batch.of(columns, order_by=self._spec.order_by, kinds=kinds), tables)
        try:
            tables.apply(result, program.tables, forget=forget)
        except USER_ERRORS as error:  # too late to skip a row
            raise failed(self._operator.name, error, None) from error
        text = result.explanation
        self._explanations[text] = self._explanations.get(text, 0) + 1
        return self._added(result)

    def _run_tolerantly(self, domain: bytes, rows: pa.RecordBatch) -> Iterator[Mapping[str, pa.RecordBatch]]:
        """Run the rows of a domain without those for which a function raises.

        A batch that fails is halved in the order in which its transactions run: the first half runs and is applied
        before the second, so the result equals running them one after the other and skipping the bad ones.
        """
        order = np.argsort(_numbers(rows.column(self._spec.order_by)), kind="stable")
        # Windows of the rows that have yet to run may look back at the past of tables, so only the last part forgets.
        keep = dict.fromkeys(self._forget(), None)

        def attempt(start: int, stop: int) -> tuple[Array, pa.RecordBatch]:
            chosen = np.sort(order[start:stop])
            part = rows.take(pa.array(chosen))
            added = self._executed(domain, [part], self._forget() if stop == len(order) else keep)
            return chosen, pa.RecordBatch.from_arrays([*part.columns, *added], schema=self._operator.schema)

        try:
            parts, errors = by_halves(len(order), attempt)
        except MemoryError as error:
            raise failed(self._operator.name, error, None) from error
        if parts:
            arrival = np.argsort(np.concatenate([chosen for chosen, _ in parts]))
            outcome = pa.concat_batches([part for _, part in parts]).take(pa.array(arrival))
            for start in range(0, outcome.num_rows, BLOCK):
                yield {ONLY: outcome.slice(start, BLOCK)}
        if errors:
            reasons = {int(order[place]): reason_of(error) for place, error in errors.items()}
            yield self._errors_branch.rows(rows, reasons)

    def _found(self, rows: pa.RecordBatch) -> pa.Array:
        """The number of the transaction that each row names; null if there is no such transaction."""
        return pc.index_in(rows.column(self._spec.which), value_set=pa.array(self._spec.transactions, pa.string()))

    def _unknown(self, rows: pa.RecordBatch, row: int) -> SchemaError:
        name = rows.column(self._spec.which)[row].as_py()
        return SchemaError(
            f"column {self._spec.which!r} names the transaction {name!r}; the transactions are "
            f"{', '.join(self._spec.transactions)}",
            column=self._spec.which,
        )

    def _kinds(self, rows: pa.RecordBatch) -> Array:
        """The number of the transaction that each row triggers."""
        found = self._found(rows)
        if found.null_count:
            row = int(pc.index(found.is_null(), True).as_py())
            raise failed(self._operator.name, self._unknown(rows, row), row_at(rows, row))
        numbers: Array = found.to_numpy(zero_copy_only=False).astype(np.int8)
        return numbers

    def _forget(self) -> dict[str, int | None]:
        """For each table with a past, the time up to which no window will look back."""
        sizes: dict[str, int] = {}
        program = self._engine.program
        for kind in program.types:
            for window in kind.windows:
                table = kind.tables[kind.slots[window.slot].table].name
                sizes[table] = max(window.size, sizes.get(table, 0))
        watermark = self._times.watermark
        return {table: None if watermark is None else watermark - size for table, size in sizes.items()}

    def _added(self, result: Result) -> list[pa.Array]:
        """The columns that are appended to those of the rows."""
        program = self._engine.program
        added = []
        for name in returned_by(program.types):
            gives = np.array([name in kind.returns for kind in program.types])
            added.append(pa.array(result.returned[name], mask=~(result.committed & gives[result.kinds])))
        return [*added, pa.array(result.committed), _reasons(result)]


def _numbers(column: pa.Array) -> npt.NDArray[np.int64]:
    values: npt.NDArray[np.int64] = column.cast(pa.int64()).to_numpy()
    return values


def _reasons(result: Result) -> pa.Array:
    """Why each row aborted; null if it committed."""
    if result.committed.all():
        return pa.nulls(len(result.committed), pa.string())
    texts = [text for kind in result.texts for text in kind]
    firsts = np.cumsum([0, *(len(kind) for kind in result.texts)])[:-1]
    numbers = firsts[result.kinds] + result.reasons - 1
    return pa.array(texts, pa.string()).take(pa.array(numbers, mask=result.committed))
