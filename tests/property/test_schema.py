from __future__ import annotations

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from midstream.data.schema import conform, parse_ddl, to_ddl
from midstream.errors import SchemaError

flat_types = st.one_of(
    st.sampled_from(
        [
            pa.bool_(),
            pa.int8(),
            pa.int16(),
            pa.int32(),
            pa.int64(),
            pa.float32(),
            pa.float64(),
            pa.string(),
            pa.binary(),
            pa.date32(),
            pa.timestamp("us", "UTC"),
            pa.timestamp("us"),
        ]
    ),
    st.integers(1, 38).flatmap(lambda p: st.integers(0, p).map(lambda s: pa.decimal128(p, s))),
)
names = st.text(st.characters(blacklist_categories=["Cs"]), min_size=1, max_size=8)


def fields_of(types: st.SearchStrategy[pa.DataType]) -> st.SearchStrategy[list[pa.Field]]:
    field = st.builds(pa.field, names, types, nullable=st.booleans())
    return st.lists(field, min_size=1, max_size=4, unique_by=lambda f: f.name.lower())


types = st.recursive(
    flat_types,
    lambda inner: st.one_of(
        inner.map(pa.list_), st.builds(pa.map_, inner, inner), fields_of(inner).map(pa.struct)
    ),
    max_leaves=6,
)  # fmt: skip
schemas = fields_of(types).map(pa.schema)


@given(schemas)
def test_parsing_a_written_schema_yields_the_same_schema(schema):
    again = parse_ddl(to_ddl(schema))
    assert again.equals(schema)
    assert [f.nullable for f in again] == [f.nullable for f in schema]


@given(schemas, st.data())
def test_damaged_ddl_is_parsed_or_refused_at_a_position_inside_it(schema, data):
    ddl = to_ddl(schema)
    at = data.draw(st.integers(0, len(ddl)))
    cut = data.draw(st.integers(0, 3))
    damaged = (
        ddl[:at] + data.draw(st.sampled_from(["", "<", ">", ",", "`", "(", "int", "'", " not "])) + ddl[at + cut :]
    )
    position = 0
    try:
        parse_ddl(damaged)
    except SchemaError as error:
        position = error.position
    assert 0 <= position <= len(damaged)


@given(st.lists(st.none() | st.text(max_size=5)), st.integers(0, 3), st.integers(0, 3))
def test_no_representation_of_a_string_column_changes_its_values(values, skip, drop):
    schema = parse_ddl("c string, l array<string>")
    stop = max(skip, len(values) - drop)
    wanted = values[skip:stop]
    nested = [None if v is None else [v, None, v] for v in values]
    for kind in (pa.string(), pa.large_string(), pa.string_view()):
        for strings in (pa.array(values, kind), pa.array(values, pa.dictionary(pa.int32(), pa.string()))):
            lists = pa.array(nested, pa.large_list(kind))
            batch = pa.record_batch({"l": lists, "c": strings})[skip:stop]
            result = conform(batch, schema, "f")
            result.validate(full=True)
            assert result.schema == schema
            assert result.column("c").to_pylist() == wanted
            assert result.column("l").to_pylist() == nested[skip:stop]


INTEGERS = {pa.int8(): 8, pa.int16(): 16, pa.int32(): 32, pa.int64(): 64}


@given(st.sampled_from(list(INTEGERS)), st.sampled_from(list(INTEGERS)), st.data())
def test_integers_widen_and_never_narrow(found, wanted, data):
    limit = 2 ** (INTEGERS[found] - 1)
    values = data.draw(st.lists(st.none() | st.integers(-limit, limit - 1)))
    batch = pa.record_batch({"c": pa.array(values, found)})
    schema = pa.schema([("c", wanted)])
    if INTEGERS[found] <= INTEGERS[wanted]:
        assert conform(batch, schema, "f").column("c").to_pylist() == values
    else:
        with pytest.raises(SchemaError):
            conform(batch, schema, "f")
