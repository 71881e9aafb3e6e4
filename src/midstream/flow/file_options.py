"""The options of a :class:`~midstream.FileSink`: those that Spark's writers know. Spark itself ignores unknown ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from midstream.data.ddl import closest
from midstream.errors import FlowError

__all__ = ["LocalOptions", "file_options"]

_ALL = ("compression", "maxRecordsPerFile")
_TEXT = (
    "charset",
    "dateFormat",
    "encoding",
    "lineSep",
    "locale",
    "timeFormat",
    "timeZone",
    "timestampFormat",
    "timestampNTZFormat",
)
KNOWN: Mapping[str, tuple[str, ...]] = {
    "parquet": _ALL,
    "json": (*_ALL, *_TEXT, "ignoreNullFields", "pretty", "sortKeys", "writeNonAsciiCharacterAsCodePoint"),
    "csv": (
        *_ALL,
        *_TEXT,
        "charToEscapeQuoteEscaping",
        "codec",
        "comment",
        "delimiter",
        "emptyValue",
        "escape",
        "escapeQuotes",
        "header",
        "ignoreLeadingWhiteSpace",
        "ignoreTrailingWhiteSpace",
        "nullValue",
        "quote",
        "quoteAll",
        "sep",
    ),
}
"""Known options, by format. Parquet's own options, which begin with ``parquet.``, are passed on as well."""

_UNCOMPRESSED = ("none", "uncompressed")
_LOCAL_OPTIONS = {"parquet": ("compression",), "json": ("compression",), "csv": ("compression", "header", "sep")}
_LOCAL_CODECS = {
    "parquet": (*_UNCOMPRESSED, "gzip", "snappy", "zstd"),
    "json": (*_UNCOMPRESSED, "gzip"),
    "csv": (*_UNCOMPRESSED, "gzip"),
}


def file_options(format: str, options: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    """The options as Spark takes them; raises :class:`FlowError` for unknown ones. Case does not matter, as in Spark.

    >>> file_options("csv", {"header": True})
    (('header', 'True'),)
    """
    known = {name.lower(): name for name in KNOWN[format]}
    for name, value in options.items():
        if name.lower() not in known and not (format == "parquet" and name.startswith("parquet.")):
            near = closest(name, list(known.values()))
            raise FlowError(
                f"FileSink: {format} has no option {name!r}"
                + (f"; did you mean {near!r}?" if near else ".")
                + f" Allowed: {', '.join(sorted(known.values(), key=str.lower))}"
                + (", and Parquet's own (parquet.…)" if format == "parquet" else "")
            )
        if not isinstance(value, str | bool | int | float):
            raise FlowError(
                f"FileSink: option {name!r} must be a string, a number or a boolean, found {type(value).__name__} "
                f"{value!r:.60}"
            )
    return tuple(sorted((name, str(value)) for name, value in options.items()))


@dataclass(frozen=True)
class LocalOptions:
    """The options that the local runtime supports."""

    codec: str | None
    header: bool
    separator: str

    @classmethod
    def of(cls, format: str, options: Sequence[tuple[str, str]], what: str) -> LocalOptions:
        """Read a sink's options; raises :class:`FlowError` for those that only Spark supports.

        >>> LocalOptions.of("csv", [("header", "True")], "sink 'out'")
        LocalOptions(codec=None, header=True, separator=',')
        """
        given = {name.lower(): value for name, value in options}
        if "delimiter" in given and format == "csv":
            given.setdefault("sep", given.pop("delimiter"))
        codec = given.get("compression", "snappy" if format == "parquet" else "none").lower()
        unknown = sorted(set(given) - set(_LOCAL_OPTIONS[format]))
        if unknown or codec not in _LOCAL_CODECS[format]:
            raise FlowError(
                f"{what}: the local runtime cannot write {format} files with "
                f"{', '.join(unknown) or f'compression={codec!r}'}; it supports {', '.join(_LOCAL_OPTIONS[format])} "
                f"(of {', '.join(_LOCAL_CODECS[format])}). Give the flow another sink for tests"
            )
        return cls(
            codec=None if codec in _UNCOMPRESSED else codec,
            header=given.get("header", "false").lower() == "true",
            separator=given.get("sep", ","),
        )
