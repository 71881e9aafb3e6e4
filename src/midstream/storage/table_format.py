"""The layout of a sink's files: format, compression, header and so on. Checked once, when the sink is created."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa

from midstream.data.ddl import closest, type_name
from midstream.errors import FlowError, SchemaError

__all__ = ["FileFormat", "TableFormat"]


class FileFormat(enum.StrEnum):
    """File formats that a :class:`~midstream.FileSink` writes."""

    PARQUET = "parquet"
    JSON = "json"
    CSV = "csv"


_CODECS: Mapping[FileFormat, tuple[str, ...]] = {
    FileFormat.PARQUET: ("none", "snappy", "gzip", "zstd", "lz4"),
    FileFormat.JSON: ("none", "gzip", "bz2"),
    FileFormat.CSV: ("none", "gzip", "bz2"),
}
"""The codecs that Spark, DuckDB and pandas can read without additional packages."""

_EXTENSIONS = {"gzip": ".gz", "bz2": ".bz2"}
_LEVELS = {"gzip": (1, 9), "zstd": (1, 22)}


@dataclass(frozen=True)
class TableFormat:
    """The layout of a sink's files. Made by :meth:`of`, which refuses unknown options.

    >>> TableFormat.of("csv", {"header": True, "compression": "gzip"}).extension
    '.csv.gz'
    """

    format: FileFormat
    compression: str = "none"
    compression_level: int | None = None
    rows_per_file: int | None = None
    """Most rows in a file; no limit if None."""
    rows_per_group: int = 1 << 20
    """For Parquet: most rows in a row group."""
    ignore_null_fields: bool = True
    """For JSON: leave out null fields, as Spark does."""
    header: bool = False
    separator: str = ","
    quote_all: bool = False

    @classmethod
    def of(cls, format: str, options: Mapping[str, Any]) -> TableFormat:
        """Read a user's options. Case and underscores do not matter: ``ignoreNullFields`` is ``ignore_null_fields``."""
        if format not in list(FileFormat):
            raise FlowError(f"FileSink: format {format!r} is not known; allowed: {', '.join(FileFormat)}")
        made = cls(FileFormat(format), "snappy" if format == FileFormat.PARQUET else "none")
        known = {_plain(name): name for name in _OPTIONS[made.format]}
        known |= {alias: name for alias, name in _ALIASES.items() if name in known.values()}
        given: dict[str, str] = {}
        for name, value in options.items():
            option = known.get(_plain(name))
            if option is None:
                near = closest(name, list(_OPTIONS[made.format]))
                raise FlowError(
                    f"FileSink: {format} has no option {name!r}{f'; did you mean {near!r}?' if near else ''} "
                    f"Allowed: {', '.join(_OPTIONS[made.format])}"
                )
            if option in given:
                raise FlowError(f"FileSink: {given[option]!r} and {name!r} are the same option; give one of them")
            given[option] = name
            made = _OPTIONS[made.format][option](made, name, value)
        if made.compression_level is not None:
            low, high = _LEVELS.get(made.compression, (1, 0))
            if not low <= made.compression_level <= high:
                levels = f"levels {low} to {high}" if high else "no levels"
                raise FlowError(
                    f"FileSink: compression_level={made.compression_level}, but {made.compression} has {levels}"
                )
        return made

    @property
    def extension(self) -> str:
        """The extension of the files; readers derive the compression of text files from it."""
        inner = "" if self.format is FileFormat.PARQUET else _EXTENSIONS.get(self.compression, "")
        return f".{self.format}{inner}"

    def check(self, schema: pa.Schema, what: str) -> None:
        """Refuse columns that the format cannot hold.

        >>> TableFormat.of("csv", {}).check(pa.schema([("tags", pa.list_(pa.string()))]), "sink 'out'")
        Traceback (most recent call last):
            ...
        midstream.errors.SchemaError: sink 'out': column 'tags' is array<string>, which csv cannot hold; write parquet \
or json, or turn it into text with a map before the sink
        """
        for field in schema if self.format is FileFormat.CSV else ():
            if pa.types.is_nested(field.type) or pa.types.is_binary(field.type):
                raise SchemaError(
                    f"{what}: column {field.name!r} is {type_name(field.type)}, which csv cannot hold; write parquet "
                    f"or json, or turn it into text with a map before the sink",
                    column=field.name,
                )


def _plain(name: str) -> str:
    return name.replace("_", "").lower()


def _compression(made: TableFormat, name: str, value: Any) -> TableFormat:
    codec = str(value).lower()
    codec = {"uncompressed": "none", "bzip2": "bz2", "lz4_raw": "lz4"}.get(codec, codec)
    if codec not in _CODECS[made.format]:
        raise FlowError(
            f"FileSink: {made.format} files with {name}={value!r} are not possible; allowed: "
            f"{', '.join(_CODECS[made.format])}"
        )
    return replace(made, compression=codec)


def _truth(field: str) -> Callable[[TableFormat, str, Any], TableFormat]:
    def read(made: TableFormat, name: str, value: Any) -> TableFormat:
        known = {"true": True, "false": False}
        if str(value).lower() not in known:
            raise FlowError(f"FileSink: {name}={value!r} is neither True nor False")
        changed: Any = {field: known[str(value).lower()]}
        return replace(made, **changed)

    return read


def _whole(field: str) -> Callable[[TableFormat, str, Any], TableFormat]:
    def read(made: TableFormat, name: str, value: Any) -> TableFormat:
        if isinstance(value, bool) or not str(value).isdigit() or int(value) < 1:
            raise FlowError(f"FileSink: {name}={value!r} is not a whole number from 1")
        changed: Any = {field: int(value)}
        return replace(made, **changed)

    return read


def _separator(made: TableFormat, name: str, value: Any) -> TableFormat:
    if not isinstance(value, str) or len(value) != 1 or value in '"\n\r' or ord(value) > 127:
        raise FlowError(f"FileSink: {name}={value!r} cannot separate columns; give one ASCII character, such as ';'")
    return replace(made, separator=value)


_SHARED = {"compression": _compression, "rows_per_file": _whole("rows_per_file")}
_OPTIONS: Mapping[FileFormat, Mapping[str, Callable[[TableFormat, str, Any], TableFormat]]] = {
    FileFormat.PARQUET: {
        **_SHARED,
        "compression_level": _whole("compression_level"),
        "rows_per_group": _whole("rows_per_group"),
    },
    FileFormat.JSON: {**_SHARED, "ignore_null_fields": _truth("ignore_null_fields")},
    FileFormat.CSV: {**_SHARED, "header": _truth("header"), "sep": _separator, "quote_all": _truth("quote_all")},
}
_ALIASES = {
    "delimiter": "sep",
    "codec": "compression",
    "rowgroupsize": "rows_per_group",
    "maxrecordsperfile": "rows_per_file",
}
