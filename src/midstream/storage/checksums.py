"""Small files with a checksum: the content, a line break, and the content's SHA-256 in hex."""

from __future__ import annotations

import hashlib

__all__ = ["with_checksum", "without_checksum"]


def with_checksum(data: bytes) -> bytes:
    """The content with its checksum. Used for manifests and entries of the log of changes."""
    return data + b"\n" + _checksum(data)


def without_checksum(data: bytes) -> bytes | None:
    """The content without its checksum, or None if they do not match.

    >>> without_checksum(with_checksum(b"content"))
    b'content'
    >>> without_checksum(with_checksum(b"content")[:-1]), without_checksum(b"")
    (None, None)
    """
    content, _, checksum = data.rpartition(b"\n")
    return content if checksum == _checksum(content) else None


def _checksum(data: bytes) -> bytes:
    return hashlib.sha256(data).hexdigest().encode()
