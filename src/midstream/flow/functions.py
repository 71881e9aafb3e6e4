"""User functions: checked when the user passes them, packed when the job starts.

A function may be a plain function, a lambda, a closure or a callable object. It may be defined in a script, in a
notebook, or in a module that only the driver can import: everything that is not installed is packed *by value*, so
workers need none of the user's files. Objects with ``open()`` and ``close()`` are opened once in each worker process.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import inspect
import io
import pickle
import site
import sys
import sysconfig
import threading
import types
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cloudpickle

from midstream.errors import FunctionError
from midstream.ids import Digest
from midstream.storage.blobs import Blob


def label_of(function: Any) -> str:
    """How messages name a function.

    >>> label_of(len), label_of(lambda row: row)
    ('len', 'a lambda')
    """
    name = getattr(function, "__qualname__", None) or type(function).__qualname__
    return "a lambda" if name.endswith("<lambda>") else str(name).removeprefix("<locals>.")


def check_callable(function: Any, operator: str, *takes: str) -> None:
    """Refuse anything that cannot be called with these arguments (``takes`` describes each of them)."""
    arguments = takes[0] if len(takes) == 1 else f"{', '.join(takes[:-1])} and {takes[-1]}"
    if not callable(function):
        raise FunctionError(
            f"operator {operator!r}: expected a function that takes {arguments}, found {type(function).__name__} "
            f"{function!r:.80}"
        )
    if inspect.isclass(function):
        raise FunctionError(
            f"operator {operator!r}: found the class {function.__name__}; give an instance of it, "
            f"{function.__name__}(…)"
        )
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # builtins without a signature: nothing to check against
        return
    try:
        signature.bind(*takes)
    except TypeError as error:
        number = "one argument," if len(takes) == 1 else f"{len(takes)} arguments:"
        raise FunctionError(
            f"operator {operator!r}: {label_of(function)}{signature} is called with {number} {arguments}, but {error}"
        ) from None


def refuse_timers(function: Any, operator: str) -> None:
    """Refuse a function with ``on_timer`` for an operator that would never call it."""
    if hasattr(function, "on_timer"):
        raise FunctionError(
            f"operator {operator!r}: {label_of(function)} has a method on_timer, which only a process calls: "
            f"key_by(…).process(…). Use it there, or give a function without on_timer"
        )


def pack(function: Any, operator: str) -> Blob:
    """Pickle a function (or a source) so that a worker can load it. The error names the object that cannot be pickled.

    >>> import pickle
    >>> pickle.loads(pack(lambda row: {"n": row["n"] + 1}, "inc").data)({"n": 1})
    {'n': 2}
    """
    with _user_modules_by_value():
        try:
            return Blob.of(_dumps(function))
        except Exception as error:
            path = _culprit(function, label_of(function))
            raise FunctionError(
                f"operator {operator!r}: what it runs cannot be sent to workers, because {path} cannot be pickled "
                f"({_short(error)}). Create it inside open(), which runs once in each worker, or pass what is needed "
                f"to rebuild it.",
                operator=operator,
                culprit=path,
            ) from error


def _dumps(value: Any) -> bytes:
    buffer = io.BytesIO()
    LastingPickler(buffer, protocol=5).dump(value)
    return buffer.getvalue()


class LastingPickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle has no types
    """Pickles what stays in a checkpoint for years, so it refers to midstream only by public names.

    Also handles cached_property, which holds a lock in Python 3.11: classes that use it could not be pickled by value.
    """

    def reducer_override(self, obj: Any) -> Any:
        """Called by pickle for each object that is not of a built-in type."""
        if isinstance(obj, functools.cached_property):
            # The class statement sets its name, and a class pickled by value is rebuilt without one.
            return functools.cached_property, (obj.func,), {"attrname": obj.attrname}
        if isinstance(obj, _NAMED) and _is_midstreams(obj):
            return _by_public_name(obj)
        return super().reducer_override(obj)


class _Likening(LastingPickler):
    """Pickles for comparison only: the file and the lines of a function do not count."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, types.CodeType):
            names = ("code", "consts", "names", "varnames", "freevars", "cellvars", "flags", "argcount")
            more = ("posonlyargcount", "kwonlyargcount", "name", "exceptiontable")
            return tuple, ([_comparable(getattr(obj, f"co_{name}", None)) for name in (*names, *more)],)
        return super().reducer_override(obj)


def _comparable(value: Any) -> Any:
    # The order of a set of strings differs between processes.
    return sorted(map(repr, value)) if isinstance(value, frozenset) else value


def likeness(value: Any, operator: str) -> Digest:
    """A digest that two functions share if they have the same code and data, wherever they are defined.

    >>> likeness(lambda row: row["n"] > 1, "a") == likeness(lambda row: row["n"] > 1, "a")
    True
    >>> likeness(lambda row: row["n"] > 1, "a") == likeness(lambda row: row["n"] > 2, "a")
    False
    """
    buffer = io.BytesIO()
    with _user_modules_by_value():
        try:
            _Likening(buffer, protocol=5).dump(value)
        except Exception as error:
            raise FunctionError(f"operator {operator!r}: it cannot be compared ({_short(error)})") from error
    return Blob.of(buffer.getvalue()).digest


_NAMED = type | types.FunctionType | types.ModuleType
_PUBLIC = ("midstream", "midstream.errors", "midstream.testing")


def _is_midstreams(obj: Any) -> bool:
    """Whether a pickle would refer to the object by a private module of midstream."""
    module = obj.__name__ if isinstance(obj, types.ModuleType) else obj.__module__
    if str(module).partition(".")[0] != "midstream" or module in _PUBLIC:
        return False
    # Functions defined in doctests only claim to be in the module, and are pickled by value.
    return isinstance(obj, types.ModuleType) or getattr(sys.modules.get(module), obj.__name__, None) is obj


def _by_public_name(obj: Any) -> tuple[Any, ...]:
    """Pickle a class, function or module of midstream by its public name, so that it may move within midstream."""
    for name in _PUBLIC:
        module = sys.modules.get(name)
        for public in getattr(module, "__all__", ()):
            if getattr(module, public) is obj:
                return getattr, (module, public)
    raise pickle.PicklingError(
        f"{getattr(obj, '__qualname__', obj.__name__)} is internal to midstream, which may move or remove it; use the "
        f"names of {', '.join(_PUBLIC)}"
    )


# cloudpickle's registry is global and several threads may pack at once: counts the threads that need each module.
_by_value: Counter[types.ModuleType] = Counter()
_registering = threading.Lock()


@contextlib.contextmanager
def _user_modules_by_value() -> Iterator[None]:
    """Within this block, modules that are not installed are pickled by value."""
    modules = dict.fromkeys(_users_modules())
    with _registering:
        known = cloudpickle.list_registry_pickle_by_value()
        # Modules that the user has registered stay registered.
        needed = [module for module in modules if module in _by_value or module.__name__ not in known]
        for module in needed:
            cloudpickle.register_pickle_by_value(module)
            _by_value[module] += 1
    try:
        yield
    finally:
        with _registering:
            for module in needed:
                _by_value[module] -= 1
                if not _by_value[module]:
                    del _by_value[module]
                    cloudpickle.unregister_pickle_by_value(module)


@dataclass(frozen=True)
class _Judged:
    """Loaded modules as the last pack found them, and those of the user among them, by name."""

    modules: Mapping[str, types.ModuleType]
    users: Mapping[str, types.ModuleType]


_judged = _Judged({}, {})


def _users_modules() -> list[types.ModuleType]:
    """The loaded modules that are not installed. There are hundreds of modules, so each is judged once."""
    global _judged
    known, loaded = _judged, sys.modules.copy()
    if loaded != known.modules:  # compared by identity, in a fraction of the time of a loop
        users = {
            name: module
            for name, module in loaded.items()
            if (name in known.users if known.modules.get(name) is module else _is_users(name, module))
        }
        _judged = known = _Judged(loaded, users)  # replaced as a whole: other threads may pack at the same time
    return list(known.users.values())


def _installed_roots() -> tuple[Path, ...]:
    paths = sysconfig.get_paths()
    roots = [paths[key] for key in ("stdlib", "platstdlib", "purelib", "platlib")]
    roots += [*site.getsitepackages(), site.getusersitepackages()]
    roots.append(str(Path(__file__).resolve().parent.parent))  # midstream ships itself
    return tuple({Path(root).resolve(): None for root in roots})


_INSTALLED = _installed_roots()
_PACKAGES = frozenset({"site-packages", "dist-packages"})
_SPARKS = frozenset({"pyspark", "py4j"})  # a cluster has its own, in any folder


def _is_users(name: str, module: types.ModuleType) -> bool:
    if name == "__main__" or getattr(module, "__name__", None) != name:
        return False  # __main__ is by value anyway; aliases are registered under their own name
    file = getattr(module, "__file__", None)
    if file is None or name.split(".")[0] in _SPARKS:
        return False
    return not _is_installed(file)


@functools.cache
def _is_installed(file: str) -> bool:
    """Cached, because every pack asks for every module, and resolving hundreds of paths takes longer than pickling."""
    path = Path(file).resolve()
    # Clusters add package folders by PYTHONPATH or .pth files; such folders can only be recognised by name.
    return not _PACKAGES.isdisjoint(path.parts) or any(path.is_relative_to(root) for root in _INSTALLED)


def _culprit(value: Any, path: str, seen: frozenset[int] = frozenset()) -> str:
    """Path to the innermost part that cannot be pickled on its own: ``score: closure variable 'lock' (a lock)``."""
    for label, part in _parts(value):
        if id(part) in seen:
            continue
        try:
            _dumps(part)
        except Exception:
            return _culprit(part, f"{path}: {label}", seen | {id(value)})
    return f"{path} (a {type(value).__name__})"


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, types.MethodType):
        yield "its object", value.__self__
    elif isinstance(value, types.FunctionType):
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            with contextlib.suppress(ValueError):  # an empty cell: defined later, or never
                yield f"closure variable {name!r}", cell.cell_contents
        for name in sorted(_globals_used(value.__code__) & value.__globals__.keys()):
            yield f"global variable {name!r}", value.__globals__[name]
        for parameter in inspect.signature(value).parameters.values():
            if parameter.default is not parameter.empty:
                yield f"default of {parameter.name!r}", parameter.default
    elif isinstance(value, functools.partial):
        yield "its function", value.func
        for key, item in (*enumerate(value.args), *value.keywords.items()):
            yield f"argument {key!r}", item
    elif isinstance(value, dict):
        for key, item in value.items():
            yield f"item {key!r}", item
    elif isinstance(value, list | tuple | set | frozenset):
        for i, item in enumerate(value):
            yield f"item {i}", item
    else:
        for name, item in getattr(value, "__dict__", {}).items():
            if not inspect.isclass(value):
                yield f"attribute {name!r}", item


def _globals_used(code: types.CodeType) -> set[str]:
    names = {i.argval for i in dis.get_instructions(code) if i.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= _globals_used(constant)
    return names


def _short(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:200]
