"""The page on the format of checkpoints matches the code: it must list every field that is added or renamed."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any, get_args, get_type_hints

import msgspec
import pytest

from midstream.change.configuration import FIELDS as CONFIGURATION
from midstream.change.fork import ForkRecord
from midstream.checkpoint.change_records import (
    ChangeEvent,
    ChangeRecord,
    DivideRecord,
    ForgetRecord,
    InsertRecord,
    MigrationRecord,
    MoveRecord,
    RemoveRecord,
    RescaleRecord,
    RewireRecord,
    StepRecord,
    TuneRecord,
    UpdateRecord,
)
from midstream.checkpoint.control_log import ControlEntry, ControlRecord
from midstream.checkpoint.layouts import StateLayout
from midstream.checkpoint.manifest import Identity, Manifest
from midstream.checkpoint.rewind_record import Rewind
from midstream.checkpoint.savepoints import Savepoint
from midstream.checkpoint.sink_files import Committed, Merge
from midstream.checkpoint.sink_marker import SinkMarker
from midstream.engine.control_order import ControlReport
from midstream.flow.aggregations import Aggregation
from midstream.flow.graph_format import WINDOWS
from midstream.flow.model import Operator, Port
from midstream.flow.spec import SPECS, SinkTable, Spec
from midstream.flow.transactions.tables import Column, Table
from midstream.flow.windows import Window
from midstream.planner.assignment import FIELDS as ASSIGNMENTS
from midstream.planner.assignment import Assignment, DividedBin
from midstream.planner.programs import StageProgram, StateMigration
from midstream.planner.stages import NumberedWire, Place, Stage, Wire, WireNumbers
from midstream.state.files import FileRef
from midstream.state.lineage import LineageEntry, StoredLineage
from midstream.storage.documents import FORMAT
from midstream.storage.table_files import SinkFile
from midstream.storage.table_format import TableFormat

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "checkpoint-format.md").read_text(encoding="utf-8")
DOCUMENTS = {
    "Identity": Identity,
    "Manifest": Manifest,
    "Savepoint": Savepoint,
    "Rewind": Rewind,
    "Fork": ForkRecord,
    "Lineage": StoredLineage,
    "Lineage entry": LineageEntry,
    "File reference": FileRef,
    "Change": ChangeRecord,
    "Report of a control operation": ControlReport,
    "Entry of control operations": ControlEntry,
    "Control operation": ControlRecord,
    "Update": UpdateRecord,
    "Move": MoveRecord,
    "Rescale": RescaleRecord,
    "Divide": DivideRecord,
    "Migration": MigrationRecord,
    "Step": StepRecord,
    "Insert": InsertRecord,
    "Remove": RemoveRecord,
    "Rewire": RewireRecord,
    "Forget": ForgetRecord,
    "Tune": TuneRecord,
    "Event of a change": ChangeEvent,
    "Program": StageProgram,
    "Stage": Stage,
    "Wire": Wire,
    "Operator": Operator,
    "Aggregation": Aggregation,
    "Table": Table,
    "Marker of a sink": SinkMarker,
    "Port": Port,
    "Assignment": Assignment,
    "Divided bin": DividedBin,
    "Numbers of wires": WireNumbers,
    "Layout of state": StateLayout,
    "Numbered wire": NumberedWire,
    "Place": Place,
    "State migration": StateMigration,
    "Column of a table": Column,
    "Table of a sink": SinkTable,
    "Layout of files": TableFormat,
    "File of a sink": SinkFile,
    "Committed files of a sink": Committed,
    "Merge of files": Merge,
}
ROOTS = (
    Identity,
    Manifest,
    Savepoint,
    Rewind,
    ForkRecord,
    ChangeRecord,
    ControlEntry,
    StoredLineage,
    SinkMarker,
    Committed,
    Merge,
    StageProgram,
    *CONFIGURATION.values(),
    *ASSIGNMENTS.values(),
)
"""What is written as a document by itself."""


def table_under(heading: str) -> list[tuple[list[str], list[str]]]:
    """The names in the first two columns of the table under a heading, row by row."""
    [section] = re.findall(rf"^### {heading}\n(.*?)(?=^##|\Z)", PAGE, re.MULTILINE | re.DOTALL)
    rows = [line.split("|")[1:3] for line in section.splitlines() if line.startswith("| `")]
    return [(re.findall(r"`(\w+)`", first), re.findall(r"`(\w+)`", second)) for first, second in rows]


def fields_of(kind: Any) -> list[str]:
    if issubclass(kind, msgspec.Struct):
        return list(kind.__struct_fields__)
    return [field.name for field in dataclasses.fields(kind)]


@pytest.mark.parametrize("heading", DOCUMENTS)
def test_the_page_lists_the_fields_of_a_document(heading):
    assert [name for [name], _ in table_under(heading)] == fields_of(DOCUMENTS[heading])


@pytest.mark.parametrize(("heading", "kinds"), [("Kinds of operators", SPECS), ("Kinds of windows", WINDOWS)])
def test_the_page_lists_the_fields_of_every_kind(heading, kinds):
    assert {name: fields for [name], fields in table_under(heading)} == {
        name: fields_of(kind) for name, kind in kinds.items()
    }


def structures_below(hint: Any, found: set[Any]) -> None:
    """Add every class with fields that a value of this type may hold."""
    kinds: dict[Any, Any] = {Spec: SPECS.values(), Window: WINDOWS.values()}
    for part in (*kinds.get(hint, ()), *get_args(hint)):
        structures_below(part, found)
    has_fields = dataclasses.is_dataclass(hint) or (isinstance(hint, type) and issubclass(hint, msgspec.Struct))
    if has_fields and hint is not Spec and hint not in found:
        found.add(hint)
        for part in get_type_hints(hint).values():
            structures_below(part, found)


def test_the_page_has_every_class_that_a_document_may_hold():
    found: set[Any] = set()
    for root in ROOTS:
        structures_below(root, found)
    described = {*DOCUMENTS.values(), *SPECS.values(), *WINDOWS.values()}
    assert {kind.__name__ for kind in found - described} == set()
    assert {kind.__name__ for kind in described - found} == set(), "no document holds them any more"


def test_the_page_describes_the_current_format_and_is_linked():
    assert f"**format {FORMAT}**" in PAGE
    assert "(checkpoint-format.md)" in (ROOT / "docs" / "operating.md").read_text(encoding="utf-8")
