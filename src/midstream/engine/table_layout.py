"""How tables of transactions are stored in an operator's state: their keys and the layout of their values.

A table of a domain is a range of stored keys in the domain's bin::

        bin, namespace, domain (after its length), name of the table (after its length), key

Values are fixed-width structs after four bytes that identify their layout, or pickled objects. A table that windows
read also has, for each key, its recent writes: a struct for each write, oldest first. State on disk contains these
bytes; a unit test pins examples.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from midstream.data.key_space import NARROW, KeySpace
from midstream.errors import StateError
from midstream.flow.transactions import Table
from midstream.state.integers import integer_matrix, integers_of
from midstream.state.keys import MAX_STORED_KEY, Namespace
from midstream.state.values import ObjectCodec

__all__ = ["HEAD", "TableLayout", "TableRows", "keys_of", "rows_of", "stored_keys", "table_prefix"]

Array = npt.NDArray[Any]

HEAD = 4
"""Number of bytes before a value that identify its layout."""
_STORED = {"double": "<f8", "bigint": "<i8", "boolean": "?"}


def table_prefix(domain: bytes, table: str, namespace: Namespace = Namespace.TABLE, space: KeySpace = NARROW) -> bytes:
    """The prefix of all stored keys of a table. ``domain`` is the stored key of its domain: bin, namespace, value.

    >>> table_prefix(b"\\x07\\x00eu", "accounts")
    b'\\x07\\x1e\\x00\\x02eu\\x00\\x08accounts'
    """
    head = domain[: space.width] + bytes([namespace])
    return head + _behind_length(domain[space.head :]) + _behind_length(table.encode())


def _behind_length(value: bytes) -> bytes:
    return len(value).to_bytes(2, "big") + value


@dataclass(frozen=True)
class TableLayout:
    """The encoding of a table's values."""

    table: Table

    @property
    def is_packed(self) -> bool:
        """Whether values are structs; otherwise they are pickled objects."""
        return all(column.kind != "object" for column in self.table.columns)

    @property
    def digest(self) -> bytes:
        """A digest that identifies this layout."""
        columns = [(column.name, column.kind) for column in self.table.columns]
        return hashlib.blake2b(repr((self.table.key, columns)).encode(), digest_size=HEAD).digest()

    def struct(self, *, with_time: bool) -> np.dtype[Any]:
        """The dtype of a value, or of a write with its time."""
        fields = [(f"c{number}", _STORED[column.kind]) for number, column in enumerate(self.table.columns)]
        return np.dtype([("time", "<i8"), *fields] if with_time else fields)

    def structs(self, columns: Sequence[Array], times: Array | None = None) -> Array:
        """Values, or writes, as an array of structs."""
        rows = np.empty(len(columns[0]), self.struct(with_time=times is not None))
        if times is not None:
            rows["time"] = times
        for number, column in enumerate(columns):
            rows[f"c{number}"] = column
        return rows

    def columns(self, rows: Array) -> tuple[Array, ...]:
        """The columns of an array of structs."""
        return tuple(np.ascontiguousarray(rows[f"c{number}"]) for number in range(len(self.table.columns)))

    def encoded(self, columns: Sequence[Array]) -> list[bytes]:
        """The bytes of each value."""
        rows = self.structs(columns)
        packed = np.empty(len(rows), np.dtype([("head", f"V{HEAD}"), ("row", f"V{rows.dtype.itemsize}")]))
        packed["head"] = np.void(self.digest)
        packed["row"] = rows.view(f"V{rows.dtype.itemsize}")
        encoded: list[bytes] = packed.view(f"V{packed.dtype.itemsize}").tolist()
        return encoded

    def require(self, values: Sequence[bytes], width: int, what: str) -> None:
        """Check that all values were written with this layout."""
        digest = self.digest
        if any(value[:HEAD] != digest or (len(value) - HEAD) % width for value in values):
            raise StateError(
                f"{what}: the table {self.table.name!r} has values with another layout than ({self._text()}). Give it "
                f"another name, so that it starts empty, or revert the change to it"
            )

    def _text(self) -> str:
        return ", ".join(f"{column.name} {column.kind}" for column in self.table.columns)


def stored_keys(prefix: bytes, keys: Any, table: Table) -> list[bytes]:
    """The stored keys for keys of a table: a numpy array of whole numbers, or an Arrow array of strings."""
    if isinstance(keys, np.ndarray):
        matrix = np.empty((len(keys), len(prefix) + 8), np.uint8)
        matrix[:, : len(prefix)] = np.frombuffer(prefix, np.uint8)
        matrix[:, len(prefix) :] = integer_matrix(keys)
        stored: list[bytes] = matrix.view(f"V{matrix.shape[1]}").reshape(-1).tolist()
        return stored
    texts = keys.cast(pa.binary())
    longest = pc.max(pc.binary_length(texts)).as_py() or 0
    if len(prefix) + longest > MAX_STORED_KEY:
        raise StateError(
            f"table {table.name!r}: a key takes {longest} bytes; at most {MAX_STORED_KEY - len(prefix)} are allowed. "
            f"Use a shorter key, for example a hash"
        )
    found: list[bytes] = pc.binary_join_element_wise(pa.scalar(prefix, pa.binary()), texts, b"").to_pylist()
    return found


def keys_of(stored: pa.Array, skip: int, table: Table) -> Any:
    """The keys of a table, given stored keys with a prefix of ``skip`` bytes."""
    rest = pc.binary_slice(stored, skip, MAX_STORED_KEY)
    if table.key == "string":
        return rest.cast(pa.string())
    words = np.frombuffer(b"".join(rest.to_pylist()), ">u8").astype(np.uint64)
    return integers_of(words)


# ── for inspection ────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class TableRows:
    """The contents of one table, in all domains: the domain of each row as a stored key, its key, its values."""

    domains: list[bytes]
    keys: Any
    columns: tuple[Any, ...]


def rows_of(table: Table, rows: pa.Table, what: str) -> TableRows:
    """The contents of a table, given everything in an operator's state (``rows``: stored keys and values)."""
    name = _behind_length(table.name.encode())
    domains, keys, values = [], [], []
    for stored, value in zip(rows["key"].to_pylist(), rows["value"].to_pylist(), strict=True):
        if stored[1] != Namespace.TABLE:
            continue
        end = 4 + int.from_bytes(stored[2:4], "big")
        if stored[end : end + len(name)] == name:
            domains.append(bytes([stored[0], Namespace.VALUE]) + stored[4:end])
            keys.append(stored[end + len(name) :])
            values.append(value)
    layout = TableLayout(table)
    found = keys_of(pa.array(keys, pa.binary()), 0, table)
    if not layout.is_packed:
        codec = ObjectCodec(f"{what}, table {table.name!r}")
        return TableRows(domains, found, ([repr(codec.decode(value, b"").value) for value in values],))
    struct = layout.struct(with_time=False)
    layout.require(values, struct.itemsize, what)
    packed = np.frombuffer(b"".join([value[HEAD:] for value in values]), struct)
    return TableRows(domains, found, layout.columns(packed))
