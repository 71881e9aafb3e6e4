"""What a worker process holds on to between tasks: loaded functions, lookup tables, programs.

Everything is keyed by digest, so a new epoch, a new task or a new revision finds what is already there. Functions with
``open()`` are opened when first loaded. They are closed when the job needs them no more, that is, when no configuration
names them that could still be run, or when it releases the worker.
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
    """What is loaded: the blob that it was made of, and what of it."""

    digest: Digest
    kind: str
    variant: object = None


class Resources:
    """Loads blobs of one store, once each, and forgets them when they are needed no more.

    Tasks :meth:`hold` the programs that they run, so that nothing is taken from a task that is at work. May be used by
    several threads.
    """

    def __init__(self, store: BlobStore) -> None:
        self._store = store
        self._loaded: dict[_Key, Any] = {}
        self._held: Counter[Digest] = Counter()
        self._lock = threading.Lock()
        # Loading may take as long as the user's code likes. Whoever wants nothing new need not wait for it.
        self._loading = threading.Lock()

    def program(self, digest: Digest) -> StageProgram:
        """A stage program."""
        return self._once(_Key(digest, "program"), lambda: StageProgram.from_bytes(self._store.get(digest)))

    def function(self, digest: Digest, operator: str) -> Callable[..., Any]:
        """A user function, opened. ``operator`` is blamed if that fails."""
        return self._once(_Key(digest, "function"), lambda: self._open(self._store.get(digest), operator))

    def data(self, digest: Digest) -> bytes:
        """A blob as it is stored. Nothing of it is kept."""
        return self._store.get(digest)

    def made(self, kind: str, digest: Digest, variant: object, make: Callable[[], T]) -> T:
        """Whatever is expensive to make of a blob, and worth keeping from task to task as long as that is needed."""
        return self._once(_Key(digest, kind, variant), make)

    def hold(self, program: Digest) -> None:
        """A task is about to run a program: until :meth:`release`, what that names is not forgotten."""
        with self._lock:
            self._held[program] += 1

    def release(self, program: Digest) -> None:
        """The task is over. What it used stays for the next one; :meth:`forget_all_but` decides what goes."""
        with self._lock:
            self._held[program] -= 1
            self._held += Counter()  # drops those that nobody holds

    def forget_all_but(self, live: Collection[Digest]) -> frozenset[Digest]:
        """Forget all that was made of other blobs than these, and close functions among it; gives what was forgotten.

        What is forgotten by mistake does no harm: it would be loaded again.
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
        """Close every function that was opened. An error in one does not keep the others from being closed."""
        with self._lock:
            functions = [value for key, value in self._loaded.items() if key.kind == "function"]
            self._loaded.clear()
        _close(functions)

    def _once(self, key: _Key, load: Callable[[], T]) -> T:
        with self._lock:
            if key in self._loaded:
                return self._loaded[key]  # type: ignore[no-any-return]  # a key has values of one type
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
