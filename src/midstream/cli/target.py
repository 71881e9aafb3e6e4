"""``MODULE:FLOW`` on the command line: find the module, import it, get the flow.

Finding is separate from importing: a wrong name is reported at once, while importing waits for the Spark session, which
code at the module's top level may use.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, TypeVar

from midstream.operators.builder import Flow

__all__ = ["Target", "TargetError", "UserCodeError", "calling_user_code", "find", "needs_session", "to_flow"]

T = TypeVar("T")

_OURS = str(Path(__file__).resolve().parent.parent)
_HOW = "Write MODULE:FLOW, e.g. pipelines.fraud:flow or pipelines/fraud.py:flow."


class TargetError(Exception):
    """The object named on the command line does not exist, or is not a flow."""


class UserCodeError(Exception):
    """The user's module or function raised; the message is the traceback of the user's own frames."""


@dataclass(frozen=True)
class Target:
    """A module that can be imported, by file or by name, and the attribute wanted from it."""

    module: str
    file: Path | None
    attribute: str

    def load(self) -> Any:
        """Import the module and get the attribute: a Flow, or a function that returns one."""
        module = self.import_module()
        try:
            found = getattr(module, self.attribute)
        except AttributeError:
            raise TargetError(_no_attribute(self, module)) from None
        if isinstance(found, Flow) or (callable(found) and not inspect.isclass(found)):
            return found
        raise TargetError(
            f"{self} is a {type(found).__name__}, not a Flow or a function that returns one. {_candidates(module)}"
        )

    def import_module(self) -> ModuleType:
        """Import the module; a file is run again, even if it was imported before."""
        return calling_user_code(self._import)

    def _import(self) -> ModuleType:
        if self.file is None:
            return importlib.import_module(self.module)
        sys.path.insert(0, str(self.file.parent))
        spec = importlib.util.spec_from_file_location(
            self.module, self.file, loader=_Fresh(self.module, str(self.file))
        )
        if spec is None or spec.loader is None:
            raise ImportError(f"{self.file} cannot be loaded as a module")
        module = importlib.util.module_from_spec(spec)
        # Registered before it runs, as import does: dataclasses and pickle look up a module by its name.
        sys.modules[self.module] = module
        spec.loader.exec_module(module)
        return module

    def __str__(self) -> str:
        return f"{self.file or self.module}:{self.attribute}"


class _Fresh(SourceFileLoader):
    """Reads the source, never cached bytecode, whose timestamps only have a resolution of seconds."""

    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        return compile(self.get_data(path), path, "exec", dont_inherit=True)


def find(text: str, what: str = "a flow", how: str = _HOW) -> Target:
    """Check that the module exists, without importing it (its parent packages are imported)."""
    module, colon, attribute = text.rpartition(":")
    if not colon or not module or not attribute.isidentifier():
        raise TargetError(f"{text!r} does not name {what}. {how}")
    _make_importable(Path.cwd())
    if module.endswith(".py"):
        file = Path(module)
        if not file.is_file():
            raise TargetError(f"there is no file {module!r} in {Path.cwd()}. {how}")
        # A script may have the name of a module that is already loaded, which it must not replace.
        name = f"{file.stem}__flow" if file.stem in sys.modules else file.stem
        return Target(name, file.resolve(), attribute)
    if "/" in module or "\\" in module:
        raise TargetError(f"{module!r} is not a module: a path must end in .py. {how}")
    try:
        spec = calling_user_code(lambda: importlib.util.find_spec(module))
    except UserCodeError as error:
        if not _is_about(error.__cause__, module):
            raise
        spec = None
    if spec is None:
        raise TargetError(f"there is no module {module!r}, neither in {Path.cwd()} nor installed. {how}")
    return Target(module, None, attribute)


def _is_about(cause: BaseException | None, module: str) -> bool:
    """Whether the module itself could not be found, rather than something that its packages import."""
    if isinstance(cause, ModuleNotFoundError):
        return cause.name is not None and f"{module}.".startswith(f"{cause.name}.")
    return isinstance(cause, ImportError | ValueError) and module.startswith(".")


def needs_session(found: Any) -> bool:
    """Whether `found` is a function that takes the SparkSession."""
    return not isinstance(found, Flow) and bool(_parameters(found))


def to_flow(found: Any, target: Target, spark: Any = None) -> Flow:
    """The flow itself; a function is called, with the session if it takes one parameter."""
    if isinstance(found, Flow):
        return found
    parameters = _parameters(found)
    if len(parameters) > 1:
        raise TargetError(
            f"{target} takes {len(parameters)} parameters ({', '.join(parameters)}); a function that makes a flow "
            f"takes none, or one: the SparkSession."
        )
    made = calling_user_code(lambda: found(spark) if parameters else found())
    if not isinstance(made, Flow):
        raise TargetError(f"{target} returned {type(made).__name__}, not a Flow. Did you forget to return it?")
    return made


def _parameters(function: Callable[..., Any]) -> list[str]:
    """The names of required positional parameters."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    try:
        found = inspect.signature(function).parameters.values()
    except ValueError:  # a builtin without a signature
        return []
    return [p.name for p in found if p.kind in kinds and p.default is p.empty]


def _make_importable(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


def _no_attribute(target: Target, module: ModuleType) -> str:
    close = get_close_matches(target.attribute, vars(module), n=1)
    hint = f"Did you mean {close[0]!r}? " if close else ""
    return f"{target.file or target.module} has no {target.attribute!r}. {hint}{_candidates(module)}"


def _candidates(module: ModuleType) -> str:
    """Suggestions: the flows in this module, and functions defined in it that may return one."""
    flows = [name for name, value in vars(module).items() if isinstance(value, Flow)]
    functions = [
        f"{name}()"
        for name, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == module.__name__ and len(_parameters(value)) <= 1
    ]
    listed = ", ".join([*flows, *functions])
    return f"It has {listed}." if listed else "It has no Flow, and no function that could make one."


def calling_user_code(call: Callable[[], T]) -> T:
    """Call it; an exception is reported with the user's part of the traceback."""
    try:
        return call()
    except (Exception, SystemExit) as error:
        raise UserCodeError(_users_traceback(error)) from error


def _users_traceback(error: BaseException) -> str:
    """The traceback without our frames and the import system's."""
    story = traceback.TracebackException.from_exception(error)
    part: traceback.TracebackException | None = story
    while part is not None:
        part.stack = traceback.StackSummary.from_list([frame for frame in part.stack if not _is_machinery(frame)])
        part = part.__cause__ or part.__context__
    return "".join(story.format()).rstrip()


def _is_machinery(frame: traceback.FrameSummary) -> bool:
    return frame.filename.startswith((_OURS, "<frozen importlib")) or frame.filename == importlib.__file__
