"""Graphs and programs survive a round trip exactly; documents that are not understood are refused."""

from __future__ import annotations

import dataclasses
import json
import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from midstream import Flow, ListSource, MemorySink
from midstream.errors import CheckpointError
from midstream.flow.graph_format import CODEC, graph_from_document, graph_to_document
from midstream.flow.model import Graph, Operator
from midstream.flow.spec import SPECS
from midstream.flow.transactions.tables import Column, Table
from midstream.ids import Digest, Revision
from midstream.planner.programs import StageProgram, StateMigration, link
from midstream.planner.stages import compile_plan
from midstream.storage.documents import FORMAT, read_document, write_document
from tests.examples import examples
from tests.simulation.flows import random_case
from tests.simulation.keyed_flows import keyed_case_of
from tests.transacted import bank

types = st.recursive(
    st.sampled_from(
        [
            pa.bool_(),
            pa.int8(),
            pa.int64(),
            pa.float32(),
            pa.string(),
            pa.binary(),
            pa.date32(),
            pa.decimal128(38, 7),
            pa.timestamp("us", "UTC"),
            pa.timestamp("us"),
            # Spark's DDL does not describe these completely.
            pa.uint64(),
            pa.large_string(),
            pa.timestamp("ns"),
            pa.dictionary(pa.int32(), pa.string()),
        ]
    ),
    lambda inner: st.one_of(
        inner.map(pa.list_),
        inner.map(lambda kind: pa.list_(pa.field("element", kind, nullable=False))),
        st.tuples(st.sampled_from([pa.string(), pa.int64()]), inner).map(lambda pair: pa.map_(*pair)),
        inner.map(lambda kind: pa.struct([pa.field("a b", kind), pa.field("c", kind, nullable=False)])),
    ),
    max_leaves=3,
)
fields = st.builds(
    pa.field,
    st.sampled_from(["n", "user id", "`", "ø", "N"]),
    types,
    nullable=st.booleans(),
    metadata=st.sampled_from([None, None, {"unit": "m"}]),
)
schemas = st.lists(fields, max_size=4).map(pa.schema) | st.just(pa.schema([("nothing", pa.null())]))
columns = st.one_of(
    st.builds(Column, st.just("d"), st.just("double"), st.floats()),
    st.builds(Column, st.just("n"), st.just("bigint"), st.integers(-(2**63), 2**63 - 1)),
    st.builds(Column, st.just("b"), st.just("boolean"), st.booleans()),
    st.builds(Column, st.just("o"), st.just("object"), st.sampled_from([None, 0, "x", {"a": (1, 2)}])),
)


def table(name: str, key: str, parts: list[Column], single: bool) -> Table:
    made = object.__new__(Table)
    for field, value in (("name", name), ("key", key), ("columns", tuple(parts)), ("single", single)):
        object.__setattr__(made, field, value)
    return made


tables = st.builds(
    table, st.text(), st.sampled_from(["bigint", "string"]), st.lists(columns, max_size=3), st.booleans()
)
st.register_type_strategy(int, st.integers(-(2**63), 2**63 - 1))
st.register_type_strategy(pa.Schema, schemas)
st.register_type_strategy(Table, tables)
operators = st.one_of([st.builds(Operator, spec=st.from_type(spec)) for spec in SPECS.values()])


def assert_same(left: object, right: object) -> None:
    assert repr(left) == repr(right)  # also equal if there is a NaN, and the repr shows all fields


@examples(300)
@given(operators)
def test_an_operator_of_any_kind_survives_a_round_trip(operator):
    data = write_document(CODEC.encode(operator, Operator))
    found = CODEC.decode(read_document(data, "it"), Operator, "it")
    assert_same(found, operator)
    assert found.schema.equals(operator.schema, check_metadata=True)
    assert found.schema.serialize().equals(operator.schema.serialize())
    assert write_document(CODEC.encode(found, Operator)) == data


def graph_of(rng: random.Random) -> Graph:
    """Graphs of all simulations, and one of the operators on columns, which together have all operators."""
    which = rng.randrange(4)
    if which == 0:
        return random_case(rng).flow.graph
    if which == 1:
        return keyed_case_of(rng.randrange(10**6), Path("nowhere")).flow.graph
    if which == 2:
        return bank([[]], MemorySink(), domain=rng.choice([None, "region"])).graph
    flow = Flow("columns")
    rows = flow.source("in", ListSource([[]], "k string, n int, m int"))
    chosen = rows.with_columns("sums", s="n + m").where("some", f"s > {rng.randrange(9)}").select("few", "k", "s")
    chosen.rename("named", {"s": "sum"}).drop("only", "k").sink("out", MemorySink())
    return flow.graph


@examples(60)
@given(st.randoms(use_true_random=False))
def test_a_graph_and_its_programs_survive_a_round_trip(rng):
    graph = graph_of(rng)
    written_for = {op.name: tuple(graph.schema_of(port) for port in op.inputs) for op in graph if rng.random() < 0.2}
    graph = dataclasses.replace(graph, written_for=written_for)
    document = graph_to_document(graph)
    again = graph_from_document(read_document(write_document(document), "it"), "it", graph.payloads)
    assert again == graph
    assert (again.written_for, again.payloads) == (graph.written_for, graph.payloads)

    blobs = {op.name: Digest(f"{rng.randrange(16**8):064x}") for op in graph if rng.random() < 0.7}
    migrations = {name: (StateMigration(Revision(2), digest),) for name, digest in blobs.items() if rng.random() < 0.3}
    once = link(compile_plan(graph), blobs, migrations)
    twice = link(compile_plan(again), blobs, migrations)
    for program, same in zip(once, twice, strict=True):
        blob = program.to_blob()
        assert same.to_blob() == blob, "the same graph has the same digests"
        assert StageProgram.from_bytes(blob.data) == program


def test_the_simulations_have_every_kind_of_operator():
    kinds = {op.kind for seed in range(60) for op in graph_of(random.Random(seed))}
    assert kinds == set(SPECS)


# ── what is refused ───────────────────────────────────────────────────────────────────────────────────────────────


def program_document() -> Any:
    graph = bank([[]], MemorySink()).graph
    return json.loads(link(compile_plan(graph), {}, {})[-1].to_blob().data)


def read_program(document: Any) -> StageProgram:
    return StageProgram.from_bytes(json.dumps(document).encode())


def test_the_order_of_fields_in_a_program_does_not_matter():
    document = program_document()
    assert read_program(dict(reversed(document.items()))) == read_program(document)


def test_another_format_is_refused_with_advice():
    document = program_document()
    with pytest.raises(CheckpointError, match=f"format {FORMAT + 1}, which is newer .* Upgrade midstream"):
        read_program({**document, "format": FORMAT + 1})
    with pytest.raises(CheckpointError, match=f"format {FORMAT - 1}, which is older .* new checkpoint"):
        read_program({**document, "format": FORMAT - 1})
    for nothing in (None, "4", True, 4.5):
        with pytest.raises(CheckpointError, match="it has no format number"):
            read_program({**document, "format": nothing})


@pytest.mark.parametrize("data", [b"", b"\x80\x05N.", b"[4]", b"{", b'{"format": 4', b"\xff"])
def test_data_that_is_not_a_document_is_refused(data):
    with pytest.raises(
        CheckpointError, match="a program of a stage in the checkpoint is damaged, or is not a document"
    ):
        StageProgram.from_bytes(data)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("operators", 0, "spec", "kind"), "teleport", r"at operators.0.spec: unknown kind 'teleport'; known .*map"),
        (("operators", 0, "spec", "kind"), 3, "unknown kind 3"),
        (("operators", 0, "spec", "colour"), "red", r"at operators.0.spec: unknown field 'colour'; known are"),
        (("operators", 0, "spec", "order_by"), ..., r"at operators.0.spec: the field 'order_by' is missing"),
        (("operators", 0, "spec", "tables", 0, "size"), 1, r"spec.tables.0: unknown field 'size'"),
        (("operators", 0, "spec", "tables", 0, "columns", 0, "kind"), "text", "unknown kind 'text'"),
        (("operators", 0, "spec", "tables", 0, "columns", 0, "default"), "many", "'many' is not a number"),
        (("operators", 0, "spec", "timed"), 1, "at operators.0.spec.timed: 1 is not a bool"),
        (("operators", 0, "on_error"), "shrug", "at operators.0.on_error: unknown value 'shrug'; known are fail"),
        (("operators", 0, "schema"), "n bigint bigint", "at operators.0.schema: 'n bigint bigint' is not a schema"),
        (("operators", 0, "schema"), {"arrow": "AAAA"}, "is not a schema"),
        (("operators", 0, "inputs"), {}, "at operators.0.inputs: {} is not a list"),
        (("stage",), ..., "the field 'stage' is missing"),
        (("stage", "leaves"), "quietly", "at stage.leaves: unknown value 'quietly'"),
        (("schemas", "first"), "n bigint", "at schemas: 'first' is not a whole number"),
        (("later",), 1, "unknown field 'later'"),
    ],
)
def test_a_document_that_this_version_does_not_understand_is_refused(path, value, message):
    document = program_document()
    part = document
    for step in path[:-1]:
        part = part[step]
    if value is ...:
        del part[path[-1]]
    else:
        part[path[-1]] = value
    with pytest.raises(
        CheckpointError, match=f"a program of a stage in the checkpoint cannot be read: .*{message}"
    ) as it:
        read_program(document)
    assert "use the one that wrote it, or a later one" in str(it.value)


def test_a_field_with_a_default_may_be_missing():
    document = program_document()
    del document["operators"][0]["on_error"]
    assert read_program(document) == read_program(program_document())
