"""The page on the format of checkpoints matches the code: it must list every field that is added or renamed."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from midstream.checkpoint.change_records import (
    ChangeEvent,
    ChangeRecord,
    InsertRecord,
    MoveRecord,
    RemoveRecord,
    RescaleRecord,
    RewireRecord,
    UpdateRecord,
)
from midstream.checkpoint.location import Identity, Manifest
from midstream.checkpoint.sink_marker import SinkMarker
from midstream.flow.aggregations import Aggregation
from midstream.flow.graph_format import WINDOWS
from midstream.flow.model import Operator
from midstream.flow.spec import SPECS
from midstream.flow.transactions.tables import Table
from midstream.planner.programs import StageProgram
from midstream.planner.stages import Stage, Wire
from midstream.state.files import FileRef
from midstream.state.lineage import Lineage, LineageEntry
from midstream.storage.documents import FORMAT

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "checkpoint-format.md").read_text(encoding="utf-8")
DOCUMENTS = {
    "Identity": Identity,
    "Manifest": Manifest,
    "Lineage": Lineage,
    "Lineage entry": LineageEntry,
    "File reference": FileRef,
    "Change": ChangeRecord,
    "Update": UpdateRecord,
    "Move": MoveRecord,
    "Rescale": RescaleRecord,
    "Insert": InsertRecord,
    "Remove": RemoveRecord,
    "Rewire": RewireRecord,
    "Event of a change": ChangeEvent,
    "Program": StageProgram,
    "Stage": Stage,
    "Wire": Wire,
    "Operator": Operator,
    "Aggregation": Aggregation,
    "Table": Table,
    "Marker of a sink": SinkMarker,
}


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


def test_the_page_describes_the_current_format_and_is_linked():
    assert f"**format {FORMAT}**" in PAGE
    assert "(checkpoint-format.md)" in (ROOT / "docs" / "operating.md").read_text(encoding="utf-8")
