"""Values of control operations as bytes: results on their way to the driver, and those too large for that."""

from __future__ import annotations

import io
import pickle
from dataclasses import dataclass
from typing import Any

import cloudpickle

from midstream.errors import StateError
from midstream.flow.functions import LastingPickler
from midstream.ids import Digest
from midstream.storage.blobs import Blob, BlobStore

__all__ = ["StoredValue", "decoded", "encoded", "stored"]


@dataclass(frozen=True)
class StoredValue:
    """A reference to a value that a handler has stored, because it is too large for a result.

    It stays in the checkpoint while the operation is among the last ten that were made.
    """

    location: str
    digest: Digest
    size: int

    def load(self) -> Any:
        """The value."""
        return decoded(BlobStore(self.location).get(self.digest))


def stored(value: Any, location: str) -> StoredValue:
    """Store a value, and return a reference to it."""
    blob = Blob.of(_dumps(value, _KeptValues))
    return StoredValue(location, BlobStore(location, durable=False).put(blob), len(blob.data))


def encoded(value: Any, limit: int, what: str, *, lasting: bool = False) -> bytes:
    """A value as bytes; raises if it is larger than the limit, or cannot be pickled.

    ``lasting`` is for values that a checkpoint keeps: then objects of classes that midstream may move are refused.

    >>> decoded(encoded({"n": 1}, 1000, "the result"))
    {'n': 1}
    """
    try:
        data = _dumps(value, _KeptValues if lasting else _SentValues)
    except Exception as error:
        raise StateError(f"{what} cannot be pickled: {type(error).__name__}: {error}") from error
    if len(data) > limit:
        raise StateError(
            f"{what} has {len(data):,} bytes, and {limit:,} are allowed. Return ctx.store(value), which is a "
            f"reference to it; or set result_limit of the operation"
        )
    return data


def decoded(data: bytes) -> Any:
    """The value of :func:`encoded` bytes."""
    return _ValueReader(io.BytesIO(data)).load()


class _References:
    """Pickles references as plain fields, so that no name of midstream's own gets into a checkpoint."""

    def persistent_id(self, obj: Any) -> tuple[str, str, int] | None:
        return (obj.location, obj.digest, obj.size) if type(obj) is StoredValue else None


class _SentValues(_References, cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle has no types
    pass


class _KeptValues(_References, LastingPickler):
    pass


class _ValueReader(pickle.Unpickler):
    def persistent_load(self, pid: tuple[str, Digest, int]) -> StoredValue:
        return StoredValue(*pid)


def _dumps(value: Any, pickler: Any) -> bytes:
    buffer = io.BytesIO()
    pickler(buffer, protocol=5).dump(value)
    return buffer.getvalue()
