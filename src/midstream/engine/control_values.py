"""Values of control operations as bytes: results on their way to the driver, and those too large for that."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from typing import Any

import cloudpickle

from midstream.errors import StateError
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
        return pickle.loads(BlobStore(self.location).get(self.digest))


def stored(value: Any, location: str) -> StoredValue:
    """Store a value, and return a reference to it."""
    blob = Blob.of(cloudpickle.dumps(value, protocol=5))
    return StoredValue(location, BlobStore(location, durable=False).put(blob), len(blob.data))


def encoded(value: Any, limit: int, what: str) -> bytes:
    """A value as bytes; raises if it is larger than the limit, or cannot be pickled.

    >>> decoded(encoded({"n": 1}, 1000, "the result"))
    {'n': 1}
    """
    try:
        data: bytes = cloudpickle.dumps(value, protocol=5)
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
    return pickle.loads(data)
