"""The transaction types of one stream, seen together: their tables, columns and operations under common numbers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from midstream.flow.transactions.agreement import require_agreement, returned_by, tables_of
from midstream.flow.transactions.expressions import TransactionType, is_access
from midstream.flow.transactions.tables import Kind, Table

__all__ = ["Operation", "Program"]

READS, WRITES, LATE = 1, 2, 4
"""What a transaction does with a key slot, as bits."""


@dataclass(frozen=True, slots=True)
class Operation:
    """A vertex of the dependency graph: a condition to check, or a new value of a key.

    ``nodes`` are what it computes, ``reads`` the key slots whose values it needs, ``slot`` the one it writes (-1 for a
    check), ``require`` the number of the condition (-1 for a write).
    """

    nodes: tuple[int, ...]
    reads: tuple[int, ...]
    slot: int = -1
    require: int = -1


@dataclass(frozen=True)
class Program:
    """Transaction types that run together. A batch says for each event which of them it triggers, by number."""

    types: tuple[TransactionType, ...]

    @staticmethod
    def of(*types: TransactionType) -> Program:
        """Check that the types fit together."""
        require_agreement(types)
        return Program(types)

    @cached_property
    def tables(self) -> tuple[Table, ...]:
        """All tables, in the order in which the types name them."""
        return tables_of(self.types)

    @cached_property
    def table_numbers(self) -> tuple[tuple[int, ...], ...]:
        """For each type and key slot, the number of its table among :attr:`tables`."""
        number = {table.name: position for position, table in enumerate(self.tables)}
        return tuple(tuple(number[kind.tables[slot.table].name] for slot in kind.slots) for kind in self.types)

    @cached_property
    def places(self) -> tuple[tuple[tuple[int, int, tuple[int, ...]], ...], ...]:
        """For each table, where keys are that are known beforehand: key slot, node of the key, and the types.

        Types whose key in that slot is the same column of the event go together; otherwise each goes by itself.
        """
        found: list[dict[tuple[int, str | int], tuple[int, int, tuple[int, ...]]]] = [{} for _ in self.tables]
        for number, kind in enumerate(self.types):
            for position, slot in enumerate(kind.slots):
                if slot.late:
                    continue
                node = kind.nodes[slot.key]
                same = (position, node.param if node.op == "column" else number)
                groups = found[self.table_numbers[number][position]]
                _, index, kinds = groups.get(same, (position, slot.key, ()))
                groups[same] = (position, index, (*kinds, number))
        return tuple(tuple(groups.values()) for groups in found)

    @cached_property
    def columns(self) -> dict[str, Kind]:
        """The event's columns that some type uses."""
        return {name: kind for one in self.types for name, kind in one.columns.items()}

    @cached_property
    def returns(self) -> dict[str, Kind]:
        """The columns that the types return."""
        return returned_by(self.types)

    @cached_property
    def interpreted(self) -> bool:
        """Whether a Python function or object takes part."""
        return any(kind.interpreted for kind in self.types) or any(
            column.kind == "object" for table in self.tables for column in table.columns
        )

    @cached_property
    def late_tables(self) -> frozenset[int]:
        """Tables with keys that are only known while running."""
        return frozenset(
            self.table_numbers[number][position]
            for number, kind in enumerate(self.types)
            for position, slot in enumerate(kind.slots)
            if slot.late
        )

    @cached_property
    def windowed_tables(self) -> frozenset[int]:
        """Tables that some window looks at."""
        return frozenset(
            self.table_numbers[number][window.slot] for number, kind in enumerate(self.types) for window in kind.windows
        )

    @cached_property
    def flags(self) -> tuple[tuple[int, ...], ...]:
        """For each type and key slot, what is done with it: bits of READS, WRITES and LATE."""
        return tuple(_flags(kind) for kind in self.types)

    @cached_property
    def operations(self) -> tuple[tuple[Operation, ...], ...]:
        """For each type its operations: checks first, so that a transaction's order is also one of dependencies."""
        return tuple(_operations(kind) for kind in self.types)

    def calls(self, number: int, operation: Operation) -> int:
        """How many functions of the user's an operation of a type calls."""
        nodes = self.types[number].nodes
        found: set[int] = set()
        waiting = list(operation.nodes)
        while waiting:
            index = waiting.pop()
            if index not in found:
                found.add(index)
                waiting += nodes[index].args
        return sum(nodes[index].op == "call" for index in found)

    @cached_property
    def stride(self) -> dict[int, int]:
        """For each table, the most keys of it that one transaction writes."""
        return {
            table: max(
                sum(
                    self.table_numbers[number][operation.slot] == table
                    for operation in operations
                    if operation.slot >= 0
                )
                for number, operations in enumerate(self.operations)
            )
            for table in range(len(self.tables))
        }


def _flags(kind: TransactionType) -> tuple[int, ...]:
    flags = [LATE if slot.late else 0 for slot in kind.slots]
    for node in kind.nodes:
        if is_access(node):
            flags[node.param.slot] |= READS
    for write in kind.writes:
        flags[write.slot] |= WRITES
    return tuple(flags)


def _operations(kind: TransactionType) -> tuple[Operation, ...]:
    checks = [
        Operation((require.condition,), _reads(kind, (require.condition,)), require=number)
        for number, require in enumerate(kind.requires)
    ]
    last = {write.slot: write for write in kind.writes}  # a key written twice keeps the last value
    writes = [
        Operation(write.values, _reads(kind, write.values), slot=write.slot)
        for write in kind.writes
        if last[write.slot] is write
    ]
    return (*checks, *writes)


def _reads(kind: TransactionType, nodes: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(sorted(kind.slots_read_by(nodes)))
