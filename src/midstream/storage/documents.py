"""Documents: how midstream's own objects are written to a checkpoint, as JSON with a format number.

midstream never pickles objects of its own, so its classes may be renamed and moved. Only the names in documents must
stay: the fields of a class, and the *kinds* that tell apart the classes of a union (:mod:`.codec`).
`docs/checkpoint-format.md` lists them; a test compares that page with the code.

Reading is strict. A document of another format, an unknown kind or field, and a missing field that has no default are
refused, because ignoring what a newer midstream has written could change what a job computes. A later midstream may add
a field with a default and keep the format number: a document without the field means the default.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from midstream.errors import CheckpointError
from midstream.version import __version__

__all__ = [
    "FORMAT",
    "read_document",
    "read_struct",
    "require_format",
    "unreadable",
    "write_document",
    "write_struct",
]

FORMAT = 4
"""The format of everything in a checkpoint."""

_T = TypeVar("_T")


def require_format(found: object, what: str, writer: str = "") -> None:
    """Refuse a document of another format. ``writer`` is the version of midstream that wrote it, if that is known.

    >>> require_format(FORMAT + 1, "the checkpoint 'c'")
    Traceback (most recent call last):
    ...
    midstream.errors.CheckpointError: the checkpoint 'c' has format 5, which is newer than format 4 of this midstream...
    """
    by = f" (written by midstream {writer})" if writer else ""
    if type(found) is not int:
        raise CheckpointError(f"{what} is damaged, or is not a document of midstream: it has no format number")
    if found > FORMAT:
        raise CheckpointError(
            f"{what} has format {found}{by}, which is newer than format {FORMAT} of this midstream {__version__}. "
            f"Upgrade midstream to the version that wrote it, or a later one"
        )
    if found < FORMAT:
        raise CheckpointError(
            f"{what} has format {found}{by}, which is older than format {FORMAT}, the first that midstream "
            f"{__version__} reads. Start with a new checkpoint, or finish the job with the midstream that wrote it"
        )


def write_document(fields: Mapping[str, Any]) -> bytes:
    """A document as bytes: the format number and these fields. Equal fields give equal bytes."""
    return msgspec.json.encode({"format": FORMAT, **fields})


def read_document(data: bytes, what: str) -> dict[str, Any]:
    """The fields of a document, without the format number.

    >>> read_document(write_document({"name": "orders"}), "a graph")
    {'name': 'orders'}
    """
    try:
        fields = msgspec.json.decode(data, type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{what} is damaged, or is not a document of midstream: {error}") from error
    require_format(fields.pop("format", None), what, str(fields.get("version", "")))
    return fields


def write_struct(struct: msgspec.Struct) -> bytes:
    """A document with the fields of a struct: an identity, a manifest, an entry of the log of changes."""
    return write_document(msgspec.to_builtins(struct, str_keys=True))


def read_struct(data: bytes, kind: type[_T], what: str) -> _T:
    """The inverse of :func:`write_struct`; refuses fields that the struct, or one within it, does not have."""
    fields = read_document(data, what)
    try:
        struct = msgspec.convert(fields, kind, str_keys=True)
    except msgspec.ValidationError as error:
        raise unreadable(what, str(error)) from error
    _refuse_unknown(fields, msgspec.to_builtins(struct, str_keys=True), what)
    return struct


def _refuse_unknown(found: Any, known: Any, what: str) -> None:
    """``known`` is ``found``, decoded and encoded again; it lacks the fields that were not understood."""
    if isinstance(found, dict):
        for name, part in found.items():
            if name not in known:
                raise unreadable(what, f"unknown field {name!r}; known are {', '.join(known)}")
            _refuse_unknown(part, known[name], what)
    elif isinstance(found, list):
        for part, same in zip(found, known, strict=True):
            _refuse_unknown(part, same, what)


def unreadable(what: str, why: str) -> CheckpointError:
    """The error about a document of the current format that cannot be read."""
    return CheckpointError(
        f"{what} cannot be read: {why}. It is damaged, or was written by a midstream other than this "
        f"{__version__}: use the one that wrote it, or a later one"
    )
