"""Objects that a worker process keeps between tasks: loaded functions, lookup tables, programs.

All are keyed by digest, so a new epoch, task or revision finds what is already loaded. Functions with ``open()`` are
opened when they are first loaded. They are closed when the job no longer needs them, that is, when no configuration
that could still run refers to them, or when the job releases the worker.
"""

from __future__ import annotations

import contextlib
import pickle
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

from midstream.engine.failure import USER_ERRORS, failed
from midstream.ids import Digest
from midstream.planner.programs import StageProgram
from midstream.storage.blobs import BlobStore

T = TypeVar("T")


@dataclass(frozen=True)
class _Key:
    """A loaded object: its blob, and the variant made from it."""

    digest: Digest
    kind: str
    variant: object = None


class Resources:
    """Loads each blob of one store once, and drops it when it is no longer needed.

    Tasks :meth:`hold` the programs that they run, so that nothing is dropped while a task uses it. May be used by
    several threads.
    """

    def __init__(self, store: BlobStore) -> None:
        self._store = store
        self._loaded: dict[_Key, Any] = {}
        self._held: Counter[Digest] = Counter()
        self._lock = threading.Lock()
        # Loading may take as long as the user's code likes. Requests for loaded objects must not wait for it.
        self._loading = threading.Lock()

    def program(self, digest: Digest) -> StageProgram:
        """A stage program."""
        return self._load_once(_Key(digest, "program"), lambda: StageProgram.from_bytes(self._store.get(digest)))

    def function(self, digest: Digest, operator: str) -> Callable[..., Any]:
        """A user function, opened. An error names ``operator``."""
        return self._load_once(_Key(digest, "function"), lambda: self._open(self._store.get(digest), operator))

    def data(self, digest: Digest) -> bytes:
        """A blob as it is stored. Nothing of it is kept."""
        return self._store.get(digest)

    def made(self, kind: str, digest: Digest, variant: object, make: Callable[[], T]) -> T:
        """An object that is expensive to make from a loaded blob, kept as long as the blob."""
        return self._load_once(_Key(digest, kind, variant), make)

    def hold(self, program: Digest) -> None:
        """Keep everything that a program refers to until :meth:`release`, because a task is about to run it."""
        with self._lock:
            self._held[program] += 1

    def release(self, program: Digest) -> None:
        """End a hold. The objects stay for the next task; :meth:`forget_all_but` decides what is dropped."""
        with self._lock:
            self._held[program] -= 1
            self._held += Counter()  # drops counts of zero

    def forget_all_but(self, live: Collection[Digest]) -> frozenset[Digest]:
        """Drop all objects made from other blobs than these, and close the functions among them; return their digests.

        An object dropped by mistake does no harm: it is loaded again.
        """
        with self._lock:
            needed = {*live, *self._held}
            for digest in self._held:
                program = self._loaded.get(_Key(digest, "program"))
                if program is not None:
                    needed |= program.digests()
            stale = [key for key in self._loaded if key.digest not in needed]
            forgotten = {key: self._loaded.pop(key) for key in stale}
        _close(value for key, value in forgotten.items() if key.kind == "function")
        return frozenset(key.digest for key in stale)

    def close(self) -> None:
        """Close every opened function. An error in one does not keep the others from being closed."""
        with self._lock:
            functions = [value for key, value in self._loaded.items() if key.kind == "function"]
            self._loaded.clear()
        _close(functions)

    def _load_once(self, key: _Key, load: Callable[[], T]) -> T:
        with self._lock:
            if key in self._loaded:
                return self._loaded[key]  # type: ignore[no-any-return]  # all values of a key have one type
        with self._loading:
            with self._lock:
                if key in self._loaded:
                    return self._loaded[key]  # type: ignore[no-any-return]
            found = load()
            with self._lock:
                self._loaded[key] = found
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


def _close(functions: Iterable[Any]) -> None:
    for function in functions:
        if hasattr(function, "close"):
            with contextlib.suppress(*USER_ERRORS):
                function.close()
