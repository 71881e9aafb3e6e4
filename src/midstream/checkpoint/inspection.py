"""Reads the committed state of a job, running or not, from its checkpoint alone."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from midstream.checkpoint.layouts import StateLayout, kept_layouts, stored_layouts
from midstream.checkpoint.location import Checkpoint
from midstream.checkpoint.manifest import Manifest
from midstream.data.ddl import closest
from midstream.data.schema import columns_of
from midstream.errors import CheckpointError, StateError
from midstream.flow.transactions import Table
from midstream.ids import BinId, Epoch
from midstream.state.contents import contents, shown_rows
from midstream.state.keys import encode_key
from midstream.state.lineage import Lineage

ATTEMPTS = 5


@dataclass(frozen=True)
class HeldState:
    """A summary of an operator's state, for an overview."""

    operator: str
    kind: str
    keys: tuple[str, ...]
    files: int
    nbytes: int
    is_kept: bool = False
    """Whether the operator was removed, and its state is kept for one of the same name."""


def read_state(location: str, operator: str, key: tuple[Any, ...] | None = None) -> pa.Table:
    """The committed state of an operator, or of one of its keys; the job may be running."""
    for _ in range(ATTEMPTS - 1):
        try:
            return StateReader.at(location).table(operator, key)
        except CheckpointError as error:
            # A running job removes files that its newer epochs do not need; then a newer manifest exists.
            if "file" not in error.fields:
                raise
    return StateReader.at(location).table(operator, key)


@dataclass(frozen=True)
class StateReader:
    """The state of all operators after the newest committed epoch of a checkpoint."""

    checkpoint: Checkpoint
    manifest: Manifest | None

    @classmethod
    def at(cls, location: str) -> StateReader:
        """The reader of a checkpoint, whether or not a job uses it."""
        checkpoint = Checkpoint.of_any_flow(location)
        return cls(checkpoint, checkpoint.newest_manifest())

    @property
    def epoch(self) -> Epoch | None:
        """The newest committed epoch."""
        return None if self.manifest is None else self.manifest.epoch

    def overview(self) -> list[HeldState]:
        """A summary for each operator that keeps state."""
        found = []
        layouts = self._layouts()
        assert self.manifest is not None
        kept = kept_layouts(self.checkpoint, self.manifest)
        for name, layout in layouts.items():
            files = [entry.file for entry in self._lineage(name).entries]
            size = sum(file.size for file in files)
            found.append(HeldState(name, layout.operator.kind, layout.keys, len(files), size, name in kept))
        return found

    def table(self, operator: str, key: tuple[Any, ...] | None = None) -> pa.Table:
        """The state of an operator or a table, or of one of its keys.

        See :meth:`midstream.flow.spec.Spec.shown_state` of the operator's description.
        """
        if (owned := self._owned(operator)) is not None:
            return self._shown_table(*owned, key)
        layout = self.layout(operator)
        if key is None:
            rows = self._rows(operator)
            return layout.operator.spec.shown_state(layout.operator, layout.takes, rows)
        schema = self.key_schema(operator)
        space = self.checkpoint.states.space
        rows = self._rows(operator, [space.bin_of(encode_key(key, schema, f"operator {operator!r}", space=space))])
        shown = layout.operator.spec.shown_state(layout.operator, layout.takes, rows)
        for name, value in zip(schema.names, key, strict=True):
            shown = shown.filter(pc.equal(shown[name], pa.scalar(value, schema.field(name).type)))
        return shown

    def key_schema(self, operator: str) -> pa.Schema:
        """The key columns of an operator, or of a table."""
        if (owned := self._owned(operator)) is not None:
            layout, table = owned
            key = pa.field("key", pa.int64() if table.key == "bigint" else pa.string())
            return columns_of(layout.takes[0], layout.keys).append(key)
        layout = self.layout(operator)
        return columns_of(layout.takes[0], layout.keys)

    def layout(self, operator: str) -> StateLayout:
        """The layout of an operator's state; raises if no operator of this name keeps state."""
        layouts = self._layouts()
        if operator not in layouts:
            near = closest(operator, [*layouts, *self.tables()])
            known = ", ".join([*layouts, *self.tables()]) or "none"
            raise StateError(
                f"no operator {operator!r} keeps state in {self.checkpoint.location!r}; those that do: {known}"
                + (f". Did you mean {near!r}?" if near else "")
            )
        return layouts[operator]

    def tables(self) -> dict[str, str]:
        """The tables that transactions share, and the operator that each belongs to."""
        return {
            table.name: name for name, layout in self._layouts().items() for table in layout.operator.spec.shared_tables
        }

    def _owned(self, name: str) -> tuple[StateLayout, Table] | None:
        """A table of this name, and the operator that it belongs to."""
        for layout in self._layouts().values():
            for table in layout.operator.spec.shared_tables:
                if table.name == name:
                    return layout, table
        return None

    def _shown_table(self, layout: StateLayout, table: Table, key: tuple[Any, ...] | None) -> pa.Table:
        operator = layout.operator
        rows = self._rows(operator.name)
        shown = operator.spec.shown_table(operator, table, layout.takes, rows)
        for name, value in zip([*layout.keys, "key"], key or (), strict=key is not None):
            shown = shown.filter(pc.equal(shown[name], pa.scalar(value, shown.schema.field(name).type)))
        return shown

    def _rows(self, operator: str, bins: Iterable[BinId] | None = None) -> pa.Table:
        """The rows of an operator's state, as :meth:`midstream.flow.spec.Spec.shown_state` takes them."""
        states = self.checkpoint.states
        return shown_rows(contents(states, self._lineage(operator), bins), states.space)

    def _layouts(self) -> dict[str, StateLayout]:
        if self.manifest is None:
            raise CheckpointError(f"no epoch has been committed in {self.checkpoint.location!r} yet")
        return stored_layouts(self.checkpoint, self.manifest)

    def _lineage(self, operator: str) -> Lineage:
        assert self.manifest is not None
        data = self.manifest.lineages.get(operator)
        return Lineage.start(operator, self.checkpoint.states.space.bins) if data is None else Lineage.decode(data)
