"""What a worker process holds on to between tasks: loaded functions, lookup tables, programs.

Everything is keyed by digest, so a new epoch, a new task or a new revision finds what is already there. Functions with
``open()`` are opened when first loaded and closed when the job releases the worker.
"""

from __future__ import annotations

import contextlib
import pickle
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import pyarrow as pa

from midstream.data.blobs import BlobStore
from midstream.engine.failure import USER_ERRORS, failed
from midstream.engine.join_index import JoinIndex
from midstream.engine.program import StageProgram
from midstream.flow.functions import Blob
from midstream.flow.model import Lookup
from midstream.ids import Digest

T = TypeVar("T")


class LookupTable:
    """A static table, indexed by the columns a lookup joins on."""

    def __init__(self, table: pa.Table, on: tuple[str, ...]) -> None:
        self.index = JoinIndex.build(table, on)
        added = [name for name in table.column_names if name not in on]
        self.added = table.select(added).combine_chunks()


class Resources:
    """Loads blobs of one store, once each."""

    def __init__(self, store: BlobStore) -> None:
        self._store = store
        self._loaded: dict[tuple[str, Any], Any] = {}
        self._lock = threading.Lock()

    def program(self, digest: Digest) -> StageProgram:
        """A stage program."""
        return self._once(("program", digest), lambda: StageProgram.from_bytes(self._store.get(digest)))

    def function(self, digest: Digest, operator: str) -> Callable[..., Any]:
        """A user function, opened. ``operator`` is blamed if that fails."""
        return self._once(("function", digest), lambda: self._open(self._store.get(digest), operator))

    def table(self, digest: Digest, on: tuple[str, ...]) -> LookupTable:
        """A lookup table, indexed."""
        return self._once(("table", (digest, on)), lambda: LookupTable(table_from_bytes(self._store.get(digest)), on))

    def made(self, kind: str, key: Any, make: Callable[[], T]) -> T:
        """Whatever is expensive to make of what was loaded, and worth keeping from task to task."""
        return self._once((kind, key), make)

    def preload(self, program: StageProgram) -> None:
        """Load all that a program needs. What cannot be loaded is left for the task that wants it, which can say so."""
        for op in program.operators:
            digests = [program.blobs.get(op.name), *(each.function for each in program.migrations.get(op.name, ()))]
            with contextlib.suppress(Exception):
                for digest in filter(None, digests):
                    if isinstance(op.spec, Lookup):
                        self.table(digest, tuple(theirs for _, theirs in op.spec.on))
                    else:
                        self.function(digest, op.name)

    def close(self) -> None:
        """Close every function that was opened. An error in one does not keep the others from being closed."""
        with self._lock:
            functions = [value for (kind, _), value in self._loaded.items() if kind == "function"]
            self._loaded.clear()
        for function in functions:
            if hasattr(function, "close"):
                with contextlib.suppress(*USER_ERRORS):
                    function.close()

    def _once(self, key: tuple[str, Any], load: Callable[[], T]) -> T:
        with self._lock:
            if key not in self._loaded:
                self._loaded[key] = load()
            found: T = self._loaded[key]
            return found

    @staticmethod
    def _open(data: bytes, operator: str) -> Callable[..., Any]:
        try:
            function: Callable[..., Any] = pickle.loads(data)
            if hasattr(function, "open"):
                function.open()
        except USER_ERRORS as error:
            raise failed(operator, error, None) from error
        return function


def table_to_blob(table: pa.Table) -> Blob:
    """A lookup table as a blob: one Arrow IPC stream."""
    out = pa.BufferOutputStream()
    with pa.ipc.new_stream(out, table.schema) as writer:
        writer.write_table(table)
    return Blob.of(out.getvalue().to_pybytes())


def table_from_bytes(data: bytes) -> pa.Table:
    """The inverse of :func:`table_to_blob`."""
    return pa.ipc.open_stream(data).read_all()
