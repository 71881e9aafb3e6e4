"""Tracing a transaction: what it records, and its errors about functions that it cannot trace."""

from __future__ import annotations

import math

import numpy as np
import pyarrow as pa
import pytest

from midstream.errors import FunctionError, SchemaError
from midstream.flow.transactions.expressions import KeySlot, Write
from midstream.txn import Program, Table, transaction

accounts = Table("accounts", key="string", value="double", default=0.0)
counts = Table("counts", key="bigint", value="bigint", default=0)
roads = Table("roads", key="bigint", value="speed double, cars bigint", default={"speed": 0.0, "cars": 0})
SCHEMA = {"src": "string", "dst": "string", "amount": "double", "n": "bigint", "ok": "boolean", "doc": "object"}


def traced(function, schema=SCHEMA):
    return transaction(function).trace(schema)


def test_a_transfer_touches_two_keys_and_writes_both():
    def transfer(t, e):
        balance = t.read(accounts, e.src)
        t.require(balance >= e.amount)
        t.write(accounts, e.src, balance - e.amount)
        t.write(accounts, e.dst, t.read(accounts, e.dst) + e.amount)
        return {"left": balance - e.amount}

    kind = traced(transfer)
    assert [kind.text(slot.key) for slot in kind.slots] == ["e.src", "e.dst"]
    assert [write.slot for write in kind.writes] == [0, 1]
    assert [require.reason for require in kind.requires] == ["read(accounts, e.src) >= e.amount"]
    assert kind.text(kind.returns["left"]) == "read(accounts, e.src) - e.amount"
    assert kind.columns == {"src": "string", "amount": "double", "dst": "string"}
    assert not kind.late
    assert not kind.interpreted


def test_the_same_expression_is_one_node():
    def twice(t, e):
        t.write(counts, e.n + 1, t.read(counts, e.n + 1) + (e.n + 1))

    kind = traced(twice)
    assert kind.slots == (KeySlot(0, 2, False),)
    assert len([node for node in kind.nodes if node.op == "add"]) == 2


def test_whole_numbers_are_converted_to_doubles_but_never_the_reverse():
    kind = traced(lambda t, e: t.write(accounts, e.src, e.n + 1))
    assert kind.nodes[kind.writes[0].values[0]].op == "to_double"
    with pytest.raises(FunctionError, match=r"t\.floor\(x\) rounds a double down"):
        traced(lambda t, e: t.write(counts, e.n, e.amount))


def test_named_columns_are_read_and_written_by_name():
    def drive(t, e):
        now = t.read(roads, e.n)
        t.write(roads, e.n, {"cars": now.cars + 1, "speed": now["speed"]})

    kind = traced(drive)
    assert kind.writes == (Write(0, (1, 4)),)


@pytest.mark.parametrize(
    ("body", "line"),
    [
        (lambda t, e: 1 if t.read(accounts, e.src) > e.amount else 2, "branches on a value"),
        (lambda t, e: (t.read(accounts, e.src) > 0) and e.ok, "branches on a value"),
        (lambda t, e: 0 < t.read(accounts, e.src) < 5, "branches on a value"),
        (lambda t, e: [x + 1 for x in e.amount], "loops over a value"),
        (lambda t, e: math.sqrt(e.amount), "converts a value to a Python number"),
        (lambda t, e: range(e.n), "uses a value as a Python index"),
        (lambda t, e: len(e.amount), "takes the length"),
        (lambda t, e: np.maximum(e.amount, 1.0), "a numpy function"),
    ],
)
def test_control_flow_on_values_is_explained(body, line):
    with pytest.raises(FunctionError, match=line) as error:
        traced(body)
    assert "test_txn_tracing.py, line" in str(error.value)
    assert "lambda t, e:" in str(error.value), "the user's own line"
    assert "t.where(condition, a, b)" in str(error.value)
    assert "& | ~ instead of and, or, not" in str(error.value)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (lambda t, e: t.read("accounts", e.src), "'accounts', which is not a table"),
        (lambda t, e: t.read(accounts, e.n), "uses a bigint as a key of table 'accounts', whose keys must be string"),
        (lambda t, e: t.read(counts, e.src), "uses a string as a key of table 'counts', whose keys must be bigint"),
        (lambda t, e: t.write(accounts, e.src, e.ok), "gives a boolean where column 'value' of table 'accounts'"),
        (lambda t, e: t.write(roads, e.n, {"cars": 1}), "needs all of its columns"),
        (lambda t, e: t.write(roads, e.n, 1.0), "needs all of its columns"),
        (lambda t, e: t.read(roads, e.n).wheels, "no column 'wheels'; it has: speed, cars"),
        (lambda t, e: t.read(roads, e.n) + 1, "unsupported operand|name the column"),
        (lambda t, e: e.amont, "uses column 'amont'; the events have: amount, doc"),
        (lambda t, e: e.amount // 2, r"Use t\.floor\(a / b\)"),
        (lambda t, e: e.src + "x", "add on a string|uses 'x'"),
        (lambda t, e: e.doc + 1, "uses add on an object"),
        (lambda t, e: t.read(counts, t.read(counts, e.n)), r"use t\.key\(value\)"),
        (lambda t, e: t.window(counts, e.n, 0, "sum"), "window of size 0"),
        (lambda t, e: t.window(counts, e.n, 5, "median"), "asks for 'median'"),
        (lambda t, e: t.window(roads, e.n, 5, "sum"), "without naming the column"),
        (lambda t, e: t.call("len", e.n), "'len', which is not a function"),
        (lambda t, e: t.call(len), "without values; compute constants outside"),
        (lambda t, e: t.call(len, e.n, returns="text"), "returns 'text'"),
        (lambda t, e: e.amount + 2**63, "does not fit into 64 bits|uses"),
        (lambda t, e: t.require(e.amount), "gives a double where a condition needs a boolean"),
        (lambda t, e: e.n, "returns Symbol"),
        (lambda t, e: {"n": e.n}, "accesses no table"),
    ],
)
def test_mistakes_are_refused_with_a_reason(body, message):
    with pytest.raises((FunctionError, SchemaError, TypeError), match=message):
        traced(body)


def test_two_tables_with_one_name_are_refused_within_and_across_transactions():
    other = Table("accounts", key="string", value="double", default=1.0)
    with pytest.raises(FunctionError, match="two tables named 'accounts'"):
        traced(lambda t, e: (t.read(accounts, e.src), t.read(other, e.src), None)[-1])
    one = traced(lambda t, e: t.write(accounts, e.src, 1.0))
    two = traced(lambda t, e: t.write(other, e.src, 1.0))
    with pytest.raises(SchemaError, match="disagree about table 'accounts'"):
        Program.of(one, two)


def test_an_arrow_schema_is_accepted():
    schema = pa.schema({"src": pa.string(), "amount": pa.float32(), "n": pa.int16()})
    kind = traced(lambda t, e: t.write(accounts, e.src, e.amount + e.n), schema)
    assert kind.columns == {"src": "string", "amount": "double", "n": "bigint"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"key": "double", "value": "double", "default": 0.0}, "a key must be 'bigint' or 'string'"),
        ({"value": "double"}, "needs a default"),
        ({"value": "bigint", "default": 1.5}, "1.5 is not a bigint"),
        ({"value": "bigint", "default": 2**63}, "does not fit into 64 bits"),
        ({"value": "bigint", "default": True}, "True is not a bigint"),
        ({"value": "bigint", "default": math.nan}, "NaN is not a bigint"),
        ({"value": "a double, b string", "default": {"a": 1, "b": ""}}, "column 'b' is of type string"),
        ({"value": "a double, b double", "default": {"a": 1}}, "must have a value for each column"),
        ({"value": "a double, b double", "default": 0}, "must have a value for each column"),
    ],
)
def test_an_invalid_table_is_refused_with_a_reason(options, message):
    with pytest.raises(SchemaError, match=message):
        Table("t", **options)


def test_late_keys_and_python_functions_are_detected():
    late = traced(lambda t, e: t.write(counts, t.key(t.read(counts, e.n)), 1))
    assert late.late
    assert not late.interpreted
    assert traced(lambda t, e: t.write(accounts, e.src, t.call(math.sqrt, e.amount))).interpreted
