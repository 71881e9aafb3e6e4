"""The public API: exported names, base classes of errors, and a docstring for every public name."""

from __future__ import annotations

import importlib
import inspect
import pickle
import pkgutil
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

import midstream
from midstream import errors, testing


def test_midstream_exports_exactly_these_names():
    assert midstream.__all__ == [
        "Access",
        "Assignment",
        "AutoScale",
        "Balance",
        "Change",
        "ConsoleSink",
        "Constant",
        "ControlContext",
        "ControlHandle",
        "ControlMessage",
        "ControlOperation",
        "Controller",
        "DatabaseSink",
        "DeltaSink",
        "DeltaSource",
        "Divide",
        "Drain",
        "Executors",
        "FileSink",
        "Flow",
        "GeneratorSource",
        "IcebergSink",
        "Insert",
        "Job",
        "KafkaSink",
        "KeyedStream",
        "ListSource",
        "MemorySink",
        "MidstreamError",
        "Migrate",
        "Migration",
        "Move",
        "NoopSink",
        "Observation",
        "Outcome",
        "Pace",
        "Proposal",
        "Rebalance",
        "Remove",
        "Rescale",
        "Rewire",
        "Savepoint",
        "Schedule",
        "Share",
        "Sharing",
        "Situation",
        "SquareWave",
        "State",
        "Step",
        "Stream",
        "Table",
        "Tune",
        "Update",
        "__version__",
        "agg",
        "committed_files",
        "delete_savepoint",
        "forget_state",
        "fork",
        "local_session",
        "rewind",
        "runs_that_count",
        "savepoints",
        "sessions",
        "sliding",
        "take_savepoint",
        "transaction",
        "tumbling",
    ]
    assert all(hasattr(midstream, name) for name in midstream.__all__)
    assert midstream.__all__ == sorted(midstream.__all__)
    assert set(midstream.__all__) <= set(dir(midstream))
    with pytest.raises(AttributeError, match="module 'midstream' has no attribute 'colour'"):
        _ = midstream.colour  # type: ignore[attr-defined]


def test_importing_midstream_loads_no_optional_package():
    code = "import sys, midstream; print(*{'pyspark', 'pandas', 'starlette', 'uvicorn', 'numba'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


def test_testing_exports_exactly_these_names():
    assert testing.__all__ == [
        "ChangeAt",
        "ControlAt",
        "Faults",
        "ListSource",
        "LocalRun",
        "ManualClock",
        "MemorySink",
        "MigrateAt",
        "run_local",
        "run_spark",
    ]
    assert all(hasattr(testing, name) for name in testing.__all__)


HIERARCHY = {
    "MidstreamError": (Exception,),
    "FlowError": (errors.MidstreamError, ValueError),
    "SchemaError": (errors.FlowError,),
    "FunctionError": (errors.FlowError,),
    "SourceError": (errors.FlowError,),
    "StateError": (errors.MidstreamError, RuntimeError),
    "SetupError": (errors.MidstreamError, RuntimeError),
    "CheckpointError": (errors.MidstreamError, RuntimeError),
    "ChangeFailed": (errors.MidstreamError, RuntimeError),
    "OperatorFailed": (errors.MidstreamError, RuntimeError),
    "JobFailed": (errors.MidstreamError, RuntimeError),
    "ControlFailed": (errors.MidstreamError, RuntimeError),
    "ControlError": (errors.MidstreamError, RuntimeError),
    "ChannelError": (errors.ControlError,),
    "Fenced": (errors.ControlError,),
    "ProtocolError": (errors.ControlError,),
}


def test_errors_have_these_base_classes():
    assert {name: getattr(errors, name).__bases__ for name in errors.__all__} == HIERARCHY


def test_the_drawing_in_the_docstring_shows_every_error():
    drawing = errors.__doc__ or ""
    assert [name for name in HIERARCHY if f"── {name}" not in drawing] == ["MidstreamError"]


@pytest.mark.parametrize("name", HIERARCHY)
def test_every_error_survives_pickling_with_its_fields(name):
    error = getattr(errors, name)("what was found", operator="m", row={"n": 1})
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert (str(again), again.operator, again.row) == ("what was found", "m", {"n": 1})
    with pytest.raises(AttributeError, match=f"{name} has no attribute 'colour'"):
        _ = again.colour


def modules() -> Iterator[Any]:
    yield midstream
    for info in pkgutil.walk_packages(midstream.__path__, "midstream."):
        if not info.name.startswith(("midstream.runtime.", "midstream.__main__", "midstream.cli")):
            yield importlib.import_module(info.name)  # those left out need Spark, or run a program


def public(owner: Any, module: str) -> Iterator[tuple[str, Any]]:
    for name, value in vars(owner).items():
        if not name.startswith("_") and getattr(value, "__module__", module) == module:
            yield name, value


def test_every_public_name_has_a_docstring():
    bare = []
    for module in modules():
        assert module.__doc__, module.__name__
        for name, value in public(module, module.__name__):
            if inspect.isfunction(value) or inspect.isclass(value):
                bare += [] if inspect.getdoc(value) else [f"{module.__name__}.{name}"]
            if inspect.isclass(value):
                for method, item in public(value, module.__name__):
                    described = isinstance(item, property) or inspect.isfunction(item) or isinstance(item, classmethod)
                    if described and not inspect.getdoc(getattr(value, method)):
                        bare.append(f"{module.__name__}.{name}.{method}")
    assert bare == []


EXPORTED = [name for name in midstream.__all__ if name != "__version__"]
ON_SPARK = {"Change", "Job", "Migration", "local_session"}
"""What only a job on Spark gives: examples are shown there, and those in the README and in docs/ are run."""


@pytest.mark.parametrize("name", EXPORTED)
def test_every_exported_name_has_a_docstring_that_explains_it(name):
    assert len(inspect.getdoc(getattr(midstream, name)) or "") > 40


@pytest.mark.parametrize("name", EXPORTED)
def test_every_exported_name_has_an_example(name):
    told = inspect.getdoc(getattr(midstream, name)) or ""
    assert ("::\n" in told) if name in ON_SPARK else (">>> " in told)
