"""Converts frozen dataclasses to JSON and back, by the types of their fields. Used to store graphs and programs."""

from __future__ import annotations

import base64
import dataclasses
import enum
import functools
import math
import operator
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import pyarrow as pa

from midstream.data.ddl import parse_ddl, to_ddl
from midstream.errors import SchemaError
from midstream.storage.documents import unreadable

__all__ = ["Codec", "DocumentMisfit", "float_from_json", "float_to_json"]

_T = TypeVar("_T")
_KIND = "kind"
_Convert = Callable[[Any], Any]


class DocumentMisfit(Exception):
    """A part of a document does not match its type; ``path`` is where it is in the document."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason
        self.path: list[str] = []


class Codec:
    """Converts frozen dataclasses to JSON values and back, by the types of their fields.

    ``kinds`` maps each union to its classes by name; a value is stored with that name under ``"kind"``. ``leaves`` maps
    other types to a pair of functions, which convert their values to JSON and back. A class may also have
    ``to_document`` and ``from_document``, which raises :class:`ValueError` for what it cannot read.

    >>> @dataclasses.dataclass(frozen=True)
    ... class Circle:
    ...     radius: int
    >>> @dataclasses.dataclass(frozen=True)
    ... class Square:
    ...     side: int
    >>> shapes = Codec({Circle | Square: {"circle": Circle, "square": Square}})
    >>> shapes.encode((Circle(1), Square(2)), tuple[Circle | Square, ...])
    [{'kind': 'circle', 'radius': 1}, {'kind': 'square', 'side': 2}]
    >>> shapes.decode({"kind": "circle", "radius": 1}, Circle | Square, "a shape")
    Circle(radius=1)
    """

    def __init__(
        self,
        kinds: Mapping[Any, Mapping[str, type]],
        leaves: Mapping[type, tuple[_Convert, _Convert]] = types.MappingProxyType({}),
    ) -> None:
        self._kinds = dict(kinds)
        self._leaves = {pa.Schema: (_schema_to_json, _schema_from_json), **leaves}
        self._converters: dict[Any, tuple[_Convert, _Convert]] = {}

    def encode(self, value: Any, hint: Any) -> Any:
        """The JSON of a value of this type."""
        return self._converter(hint)[0](value)

    def decode(self, found: Any, hint: Any, what: str) -> Any:
        """The inverse of :meth:`encode`; ``what`` names the document in errors."""
        return self._read(self._converter(hint)[1], found, what)

    def decode_fields(self, found: Any, hints: Mapping[str, Any], what: str) -> dict[str, Any]:
        """The fields of a document that has no class of its own; exactly these must be present."""
        fields: dict[str, Any] = self._read(self._record(hints, frozenset(hints), dict)[1], found, what)
        return fields

    @staticmethod
    def _read(decode: _Convert, found: Any, what: str) -> Any:
        try:
            return decode(found)
        except DocumentMisfit as error:
            place = f"at {'.'.join(error.path)}: " if error.path else ""
            raise unreadable(what, place + error.reason) from error

    def _converter(self, hint: Any) -> tuple[_Convert, _Convert]:
        """The two functions that convert a type, built once."""
        if hint not in self._converters:
            self._converters[hint] = self._made(hint)
        return self._converters[hint]

    def _made(self, hint: Any) -> tuple[_Convert, _Convert]:
        if hint in self._leaves:
            return self._leaves[hint]
        if hint in self._kinds:
            return self._tagged(self._kinds[hint])
        if hint in (int, str, bool):
            return _as_it_is, functools.partial(_checked, hint)
        if hint is float:
            return float_to_json, float_from_json
        if isinstance(hint, typing.NewType):
            return self._converter(hint.__supertype__)
        if isinstance(hint, type) and issubclass(hint, enum.Enum):
            return operator.attrgetter("value"), functools.partial(_one_of, {one.value: one for one in hint})
        if isinstance(hint, type) and hasattr(hint, "to_document") and hasattr(hint, "from_document"):
            return hint.to_document, functools.partial(_by_its_class, hint.from_document)
        if dataclasses.is_dataclass(hint):
            return self._fields(hint)
        origin, args = typing.get_origin(hint), typing.get_args(hint)
        if origin is typing.Literal:
            return _as_it_is, functools.partial(_one_of, {one: one for one in args})
        if origin in (typing.Union, types.UnionType) and type(None) in args:
            rest = functools.reduce(operator.or_, (arg for arg in args if arg is not type(None)))
            return self._optional(rest)
        if origin is tuple:
            return self._many(args[0], tuple) if args[-1] is ... else self._row(args)
        if origin is frozenset:
            encode, decode = self._many(args[0], frozenset)
            return lambda value: encode(sorted(value)), decode
        if origin in (Mapping, dict):
            return self._mapping(*args)
        raise TypeError(f"no document can hold a {hint!r}; give the field another type, or the codec a leaf for it")

    def _fields(self, made: Any) -> tuple[_Convert, _Convert]:
        hints = typing.get_type_hints(made)
        fields = dataclasses.fields(made)
        required = frozenset(field.name for field in fields if not _has_default(field))
        return self._record({field.name: hints[field.name] for field in fields}, required, _constructor(made))

    def _record(
        self, hints: Mapping[str, Any], required: frozenset[str], construct: Callable[..., Any]
    ) -> tuple[_Convert, _Convert]:
        converters = {name: self._converter(hint) for name, hint in hints.items()}

        def encode(value: Any) -> Any:
            return {name: convert(getattr(value, name)) for name, (convert, _) in converters.items()}

        def decode(found: Any) -> Any:
            _checked(dict, found)
            if unknown := found.keys() - hints.keys():
                raise DocumentMisfit(f"unknown field {min(unknown)!r}; known are {', '.join(hints) or 'none'}")
            if missing := required - found.keys():
                raise DocumentMisfit(f"the field {min(missing)!r} is missing")
            return construct(**{name: _at(name, converters[name][1], one) for name, one in found.items()})

        return encode, decode

    def _tagged(self, known: Mapping[str, type]) -> tuple[_Convert, _Convert]:
        # Looked up on use, because ``known`` grows as operators are registered.
        def encode(value: Any) -> Any:
            made = type(value)
            if any(field.name == _KIND for field in dataclasses.fields(made)):
                raise TypeError(f"{made.__name__} has a field {_KIND!r}, under which its own kind is written")
            kind = next(kind for kind, each in known.items() if each is made)
            return {_KIND: kind, **self.encode(value, made)}

        def decode(found: Any) -> Any:
            _checked(dict, found)
            kind = found.get(_KIND)
            if not isinstance(kind, str) or kind not in known:
                raise DocumentMisfit(f"unknown kind {kind!r}; known are {', '.join(known)}")
            return self._converter(known[kind])[1]({name: one for name, one in found.items() if name != _KIND})

        return encode, decode

    def _optional(self, hint: Any) -> tuple[_Convert, _Convert]:
        encode, decode = self._converter(hint)
        return (
            lambda value: None if value is None else encode(value),
            lambda found: None if found is None else decode(found),
        )

    def _many(self, hint: Any, collect: Callable[[Any], Any]) -> tuple[_Convert, _Convert]:
        encode, decode = self._converter(hint)

        def read(found: Any) -> Any:
            return collect(_at(f"{i}", decode, one) for i, one in enumerate(_checked(list, found)))

        return lambda value: [encode(one) for one in value], read

    def _row(self, hints: tuple[Any, ...]) -> tuple[_Convert, _Convert]:
        converters = [self._converter(hint) for hint in hints]

        def read(found: Any) -> Any:
            if len(_checked(list, found)) != len(converters):
                raise DocumentMisfit(f"there are {len(found)} values instead of {len(converters)}")
            pairs = zip(converters, found, strict=True)
            return tuple(_at(f"{i}", decode, one) for i, ((_, decode), one) in enumerate(pairs))

        return lambda value: [encode(one) for (encode, _), one in zip(converters, value, strict=True)], read

    def _mapping(self, key: Any, hint: Any) -> tuple[_Convert, _Convert]:
        encode, decode = self._converter(hint)
        as_key = _whole_number if getattr(key, "__supertype__", key) is int else str

        def read(found: Any) -> Any:
            return {as_key(name): _at(name, decode, one) for name, one in _checked(dict, found).items()}

        return lambda value: {str(name): encode(one) for name, one in value.items()}, read


def float_to_json(value: float) -> float | str:
    """A float as JSON. JSON has no infinities and no NaN, so these become text."""
    return value if math.isfinite(value) else str(value)


def float_from_json(found: Any) -> float:
    """The inverse of :func:`float_to_json`."""
    if found in ("nan", "inf", "-inf") or type(found) in (int, float):
        return float(found)
    raise DocumentMisfit(f"{found!r} is not a number")


def _schema_to_json(schema: pa.Schema) -> Any:
    """A schema as Spark DDL, which people can read, if that is lossless; otherwise as Arrow's serialised bytes."""
    data = schema.serialize().to_pybytes()
    ddl = _exact_ddl(data)
    return {"arrow": base64.b64encode(data).decode()} if ddl is None else ddl


@functools.lru_cache(maxsize=1024)
def _exact_ddl(data: bytes) -> str | None:
    """The DDL of a serialised schema; None if DDL cannot express all of it, for example its metadata."""
    try:
        ddl = to_ddl(pa.ipc.read_schema(pa.py_buffer(data)))
        return ddl if parse_ddl(ddl).serialize().to_pybytes() == data else None
    except SchemaError:  # no columns, or a type that Spark does not have
        return None


def _schema_from_json(found: Any) -> pa.Schema:
    try:
        if isinstance(found, str):
            return _parsed(found)
        return pa.ipc.read_schema(pa.py_buffer(base64.b64decode(_checked(dict, found)["arrow"], validate=True)))
    except (SchemaError, pa.ArrowException, KeyError, ValueError, TypeError) as error:
        raise DocumentMisfit(f"{found!r:.80} is not a schema") from error


_parsed = functools.lru_cache(maxsize=1024)(parse_ddl)  # a flow has few distinct schemas


def _as_it_is(value: Any) -> Any:
    return value


def _checked(wanted: type[_T], found: Any) -> _T:
    if type(found) is not wanted:
        raise DocumentMisfit(f"{found!r:.80} is not a {wanted.__name__}")
    return found


def _by_its_class(read: _Convert, found: Any) -> Any:
    try:
        return read(found)
    except ValueError as error:
        raise DocumentMisfit(str(error)) from error


def _one_of(known: Mapping[Any, Any], found: Any) -> Any:
    if not isinstance(found, str) or found not in known:
        raise DocumentMisfit(f"unknown value {found!r:.80}; known are {', '.join(known)}")
    return known[found]


def _whole_number(key: str) -> int:
    try:
        return int(key)
    except ValueError:
        raise DocumentMisfit(f"{key!r} is not a whole number") from None


def _at(name: str, decode: _Convert, found: Any) -> Any:
    try:
        return decode(found)
    except DocumentMisfit as error:
        error.path.insert(0, name)
        raise


def _has_default(field: dataclasses.Field[Any]) -> bool:
    return field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING


def _constructor(made: Any) -> Callable[..., Any]:
    """A function that builds an object from its fields, also if the class's own constructor takes other arguments."""
    if made.__dataclass_params__.init:
        return typing.cast("Callable[..., Any]", made)

    def fill(**values: Any) -> Any:
        built = object.__new__(made)
        for name, value in values.items():
            object.__setattr__(built, name, value)
        return built

    return fill
