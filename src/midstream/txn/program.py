"""The transaction types of one stream together: their tables, columns and operations, numbered across types."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from midstream.flow.transactions.agreement import require_agreement, returned_by, tables_of
from midstream.flow.transactions.expressions import TransactionType, is_access
from midstream.flow.transactions.tables import Kind, Table

__all__ = ["Program", "TableOperation"]

READS, WRITES, LATE = 1, 2, 4
"""How a transaction uses a key slot, as bits."""


@dataclass(frozen=True, slots=True)
class TableOperation:
    """A vertex of the dependency graph: a condition to check, or a new value of a key.

    ``nodes`` are the values it computes, ``reads`` the key slots whose values it needs, ``slot`` the one it writes (-1
    for a check), ``require`` the number of the condition (-1 for a write).
    """

    nodes: tuple[int, ...]
    reads: tuple[int, ...]
    slot: int = -1
    require: int = -1


@dataclass(frozen=True)
class Program:
    """Transaction types that run together. A batch has, for each event, the number of the type it triggers."""

    types: tuple[TransactionType, ...]

    @staticmethod
    def of(*types: TransactionType) -> Program:
        """A program of these types; refuses types that do not fit together."""
        require_agreement(types)
        return Program(types)

    @cached_property
    def tables(self) -> tuple[Table, ...]:
        """All tables, in the order in which the types refer to them."""
        return tables_of(self.types)

    @cached_property
    def table_numbers(self) -> tuple[tuple[int, ...], ...]:
        """For each type and key slot, the number of its table among :attr:`tables`."""
        number = {table.name: position for position, table in enumerate(self.tables)}
        return tuple(tuple(number[kind.tables[slot.table].name] for slot in kind.slots) for kind in self.types)

    @cached_property
    def places(self) -> tuple[tuple[tuple[int, int, tuple[int, ...]], ...], ...]:
        """For each table, the sources of keys that are known in advance: key slot, node of the key, and types.

        Types whose key in that slot is the same column of the event are grouped; any other type is on its own.
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
        """Whether the program uses a Python function or object."""
        return any(kind.interpreted for kind in self.types) or any(
            column.kind == "object" for table in self.tables for column in table.columns
        )

    @cached_property
    def late_tables(self) -> frozenset[int]:
        """Tables with keys that are computed at run time."""
        return frozenset(
            self.table_numbers[number][position]
            for number, kind in enumerate(self.types)
            for position, slot in enumerate(kind.slots)
            if slot.late
        )

    @cached_property
    def windowed_tables(self) -> frozenset[int]:
        """Tables that a window reads."""
        return frozenset(
            self.table_numbers[number][window.slot] for number, kind in enumerate(self.types) for window in kind.windows
        )

    @cached_property
    def flags(self) -> tuple[tuple[int, ...], ...]:
        """For each type and key slot, its use: bits of READS, WRITES and LATE."""
        return tuple(_flags(kind) for kind in self.types)

    @cached_property
    def operations(self) -> tuple[tuple[TableOperation, ...], ...]:
        """The operations of each type; checks first, so that the order also satisfies the dependencies."""
        return tuple(_operations(kind) for kind in self.types)

    def calls(self, number: int, operation: TableOperation) -> int:
        """The number of user functions that an operation of a type calls."""
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
        """For each table, the maximum number of its keys that one transaction writes."""
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


def _operations(kind: TransactionType) -> tuple[TableOperation, ...]:
    checks = [
        TableOperation((require.condition,), _reads(kind, (require.condition,)), require=number)
        for number, require in enumerate(kind.requires)
    ]
    last = {write.slot: write for write in kind.writes}  # the last write to a key wins
    writes = [
        TableOperation(write.values, _reads(kind, write.values), slot=write.slot)
        for write in kind.writes
        if last[write.slot] is write
    ]
    return (*checks, *writes)


def _reads(kind: TransactionType, nodes: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(sorted(kind.slots_read_by(nodes)))
