"""Functions are packed here and loaded where none of the user's files exist, or refused with the part to blame."""

from __future__ import annotations

import functools
import importlib
import json
import pickle
import subprocess
import sys
import threading
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

import midstream
from midstream import Access, State, Table, agg, transaction
from midstream.errors import FunctionError, SchemaError
from midstream.flow import functions
from midstream.flow.functions import label_of, pack
from midstream.storage.blobs import Blob
from midstream.testing import ManualClock
from tests.pickles import midstream_names

LOCK = threading.Lock()
FACTOR = 3
SOURCE_ROOT = str(Path(functions.__file__).parents[2])

# Loads a blob and calls it, in a process that has midstream but neither the project's root nor the user's folder.
LOADER = """
import json, pickle, sys
function = pickle.load(open(sys.argv[1], "rb"))
print(json.dumps([function(row) for row in json.loads(sys.argv[2])]))
print(json.dumps(sorted(set(sys.modules) & set(sys.argv[3:]))))
"""


@pytest.fixture
def call_elsewhere(tmp_path: Path) -> Callable[..., list[Any]]:
    """Packs a function and calls it in another process, on some rows; ``absent`` names modules it must do without."""

    def call(function: Any, *rows: Any, absent: tuple[str, ...] = ()) -> list[Any]:
        blob = tmp_path / "blob"
        blob.write_bytes(pack(function, "op").data)
        command = [sys.executable, "-c", LOADER, str(blob), json.dumps(rows), *absent]
        ran = subprocess.run(
            command, cwd=tmp_path, env={"PYTHONPATH": SOURCE_ROOT}, capture_output=True, text=True, check=False
        )
        assert ran.returncode == 0, ran.stderr
        results, imported = map(json.loads, ran.stdout.splitlines())
        assert imported == [], "the worker imported the user's module instead of getting it by value"
        found: list[Any] = results
        return found

    return call


@pytest.fixture
def user_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, str], Any]]:
    """Writes a module to a folder that only this process can import from, and imports it."""
    folder = tmp_path / "only_on_the_driver"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    written: list[str] = []

    def write(name: str, source: str) -> Any:
        path = folder.joinpath(*name.split(".")).with_suffix(".py")
        path.parent.mkdir(exist_ok=True)
        for parent in path.relative_to(folder).parents[:-1]:
            (folder / parent / "__init__.py").touch()
        path.write_text(dedent(source))
        written.append(name)
        importlib.invalidate_caches()
        return importlib.import_module(name)

    yield write
    for name in written:
        sys.modules.pop(name, None)


class Scaler:
    """A callable object with configuration."""

    def __init__(self, factor: int) -> None:
        self.factor = factor

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        return {"n": self.factor * row["n"]}

    def method(self, row: dict[str, Any]) -> dict[str, Any]:
        return self(row)


def by_global(row: dict[str, Any]) -> dict[str, Any]:
    return {"n": FACTOR * row["n"]}


def by_closure(factor: int) -> Callable[..., Any]:
    def scaled(row: dict[str, Any]) -> dict[str, Any]:
        return {"n": factor * row["n"]}

    return scaled


def recursive(row: dict[str, Any]) -> dict[str, Any]:
    return recursive({"n": row["n"] + 1}) if row["n"] % 3 else {"n": row["n"]}


# ── what travels ──────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "function",
    [
        lambda row: {"n": 3 * row["n"]},
        by_global,
        by_closure(3),
        Scaler(3),
        Scaler(3).method,
        functools.partial(lambda factor, row: {"n": factor * row["n"]}, 3),
    ],
    ids=["lambda", "global", "closure", "object", "method", "partial"],
)
def test_functions_of_every_kind_work_in_another_process(call_elsewhere, function):
    assert call_elsewhere(function, {"n": 2}, {"n": 5}, absent=(__name__,)) == [{"n": 6}, {"n": 15}]


def test_a_function_may_call_itself(call_elsewhere):
    assert call_elsewhere(recursive, {"n": 4}) == [{"n": 6}]


def test_a_module_that_only_the_driver_has_is_packed(call_elsewhere, user_module):
    scoring = user_module(
        "scoring_only_here",
        """
        import math
        OFFSET = 10

        class Model:
            def __init__(self):
                self.opened = 0
            def open(self):
                self.opened += 1
            def __call__(self, row):
                return {"n": helper(row["n"])}

        def helper(n):
            return math.floor(n) + OFFSET

        def score(row):
            return {"n": helper(row["n"])}
        """,
    )
    absent = ("scoring_only_here",)
    assert call_elsewhere(scoring.score, {"n": 1}, absent=absent) == [{"n": 11}]
    assert call_elsewhere(scoring.Model(), {"n": 2}, absent=absent) == [{"n": 12}]
    assert call_elsewhere(lambda row: scoring.score(row), {"n": 3}, absent=absent) == [{"n": 13}]


def test_modules_are_packed_with_the_users_modules_that_they_use(call_elsewhere, user_module):
    user_module("tables_only_here", "RATES = {'no': 2}\ndef rate(country):\n    return RATES[country]\n")
    user_module("kit_only_here.parts", "def twice(n):\n    return 2 * n\n")
    job = user_module(
        "job_only_here",
        """
        import tables_only_here
        import kit_only_here.parts
        from kit_only_here.parts import twice

        def score(row):
            return {"n": twice(row["n"]) * tables_only_here.rate("no") + kit_only_here.parts.twice(1)}
        """,
    )
    absent = ("tables_only_here", "kit_only_here", "kit_only_here.parts", "job_only_here")
    assert call_elsewhere(job.score, {"n": 5}, absent=absent) == [{"n": 22}]


def test_installed_packages_are_referred_to_by_name():
    import pyarrow.compute as pc

    by_name = pack(lambda batch: pc.add(batch, 1), "op").data
    assert b"pyarrow.compute" in by_name
    assert len(by_name) < 2_000, "a package that workers have was packed whole"


def test_packing_leaves_no_trace(user_module):
    import cloudpickle

    before = set(cloudpickle.list_registry_pickle_by_value())
    module = user_module("traceless_only_here", "def f(row):\n    return row\n")
    pack(module.f, "op")
    assert set(cloudpickle.list_registry_pickle_by_value()) == before


def test_a_neighbour_of_an_installed_package_is_still_the_users(tmp_path, monkeypatch):
    """Folders are compared by their parts: `…/midstream_app` is not inside `…/midstream`."""
    monkeypatch.setattr(functions, "_INSTALLED", (tmp_path / "midstream",))
    assert functions._is_installed(str(tmp_path / "midstream" / "errors.py"))
    assert not functions._is_installed(str(tmp_path / "midstream_app" / "errors.py"))


def test_equal_functions_are_stored_once():
    assert pack(Scaler(3), "a") == pack(Scaler(3), "b")
    assert pack(Scaler(3), "a").digest != pack(Scaler(4), "a").digest


def test_a_blob_is_named_by_its_content():
    assert Blob.of(b"x") == Blob.of(b"x")
    assert Blob.of(b"x").digest != Blob.of(b"y").digest
    assert len(Blob.of(b"").digest) == 64


# ── what cannot ───────────────────────────────────────────────────────────────────────────────────────────────────


def with_closure_lock() -> Callable[..., Any]:
    lock = threading.Lock()

    def guarded(row: Any) -> Any:
        with lock:
            return row

    return guarded


def with_global_lock(row: Any) -> Any:
    with LOCK:
        return row


def calls_one_with_a_lock(row: Any) -> Any:
    return with_global_lock(row)


def with_default(row: Any, lock: Any = LOCK) -> Any:
    return row


class Guarded:
    def __init__(self, lock: Any) -> None:
        self.name = "guarded"
        self.lock = lock

    def __call__(self, row: Any) -> Any:
        return row


@pytest.mark.parametrize(
    ("function", "culprit"),
    [
        (with_closure_lock(), "with_closure_lock.<locals>.guarded: closure variable 'lock' (a lock)"),
        (with_global_lock, "with_global_lock: global variable 'LOCK' (a lock)"),
        (
            lambda row: with_global_lock(row),
            "a lambda: global variable 'with_global_lock': global variable 'LOCK' (a lock)",
        ),
        (Guarded(LOCK), "Guarded: attribute 'lock' (a lock)"),
        (Guarded({"a": [1, {"b": LOCK}]}), "Guarded: attribute 'lock': item 'a': item 1: item 'b' (a lock)"),
        (Guarded(Guarded(LOCK)), "Guarded: attribute 'lock': attribute 'lock' (a lock)"),
        (Guarded(LOCK).__call__, "Guarded.__call__: its object: attribute 'lock' (a lock)"),
        (with_default, "with_default: default of 'lock' (a lock)"),
        (functools.partial(lambda row, lock: row, lock=LOCK), "partial: argument 'lock' (a lock)"),
        (functools.partial(with_global_lock), "partial: its function: global variable 'LOCK' (a lock)"),
    ],
)
def test_an_object_that_cannot_be_pickled_is_named_with_its_path(function, culprit):
    with pytest.raises(FunctionError) as caught:
        pack(function, "score")
    assert caught.value.operator == "score"
    assert caught.value.culprit == culprit
    message = str(caught.value)
    assert message.startswith(f"operator 'score': what it runs cannot be sent to workers, because {culprit}")
    assert "cannot pickle '_thread.lock' object" in message
    assert "open()" in message


def test_a_part_that_refers_to_itself_does_not_hang_the_search():
    looped = Guarded(LOCK)
    looped.name = looped  # type: ignore[assignment]
    with pytest.raises(FunctionError, match="attribute 'lock'"):
        pack(looped, "op")


def test_the_error_can_be_pickled():
    with pytest.raises(FunctionError) as caught:
        pack(with_global_lock, "op")
    again = pickle.loads(pickle.dumps(caught.value))
    assert (str(again), again.culprit) == (str(caught.value), caught.value.culprit)


@pytest.mark.parametrize(
    ("function", "label"),
    [(len, "len"), (lambda row: row, "a lambda"), (Scaler(1), "Scaler"), (Scaler(1).method, "Scaler.method")],
)
def test_a_function_has_a_name_for_messages(function, label):
    assert label_of(function) == label


def test_a_class_with_a_cached_property_is_packed_by_value(tmp_path, monkeypatch):
    """A cached_property holds a lock in Python 3.11, which must not prevent pickling."""
    (tmp_path / "cached_model.py").write_text(
        "from functools import cached_property\n"
        "class Model:\n"
        "    @cached_property\n"
        "    def weight(self):\n"
        "        return 3\n"
        "    def __call__(self, row):\n"
        "        return {'n': row['n'] * self.weight}\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    model = importlib.import_module("cached_model").Model()
    packed = pack(model, "score").data
    script = "import pickle, sys; print(pickle.loads(sys.stdin.buffer.read())({'n': 2}))"
    done = subprocess.run([sys.executable, "-c", script], input=packed, capture_output=True, check=True)
    assert done.stdout.decode().strip() == "{'n': 6}"


# ── what functions may name of midstream ──────────────────────────────────────────────────────────────────────────


def test_a_packed_function_refers_to_midstream_by_public_names():
    accounts = Table("accounts", value="double", default=0.0)
    tolls = Table("tolls", key="bigint", value="`top speed` double, cars bigint", default={"top speed": 1.5, "cars": 0})
    notes = Table("notes", value="object", default={"a": [1]})

    @transaction
    def deposit(t: Access, e):
        t.write(accounts, e.who, t.read(accounts, e.who) + e.amount)

    def remember(key, row, state: State):
        raise SchemaError("no")

    made = (deposit, accounts, tolls, notes, remember, ManualClock(5), midstream, agg)
    data = pack(made, "op").data
    assert midstream_names(data) == {"midstream", "midstream.errors", "midstream.testing"}
    again, *tables, function, clock, package, aggregations = pickle.loads(data)
    assert tables == [accounts, tolls, notes]
    assert again.trace({"who": "string", "amount": "double"}) == deposit.trace({"who": "string", "amount": "double"})
    assert vars(clock) == vars(ManualClock(5))
    assert (package, aggregations) == (midstream, agg)
    with pytest.raises(SchemaError):
        function("k", {}, None)


def test_internal_names_of_midstream_are_refused_because_they_may_move():
    def score(row):
        return label_of(row)

    with pytest.raises(
        FunctionError,
        match=r"score: global variable 'label_of' \(a function\) cannot be pickled .*label_of is internal to midstream",
    ):
        pack(score, "op")


def test_a_module_that_replaces_another_of_its_name_is_judged_anew(tmp_path, monkeypatch):
    installed, mine = types.ModuleType("a_model"), types.ModuleType("a_model")
    installed.__file__, mine.__file__ = pickle.__file__, str(tmp_path / "a_model.py")
    for module, is_users in ((installed, False), (mine, True), (installed, False)):
        monkeypatch.setitem(sys.modules, "a_model", module)
        assert (module in functions._users_modules()) is is_users
        assert (module in functions._users_modules()) is is_users, "the same when it is asked again"
