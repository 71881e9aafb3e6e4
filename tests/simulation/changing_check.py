"""What a flow that is changed while it runs must give: the oracle of :mod:`tests.simulation.changing_flows`.

It knows nothing of revisions, heads and positions. It computes what would come of one source row under each of the
configurations that the job has had, says the history; what did come of it, in all sinks and in all states, must be what
one of them gives. Over epochs, rows must go through the configurations in their order.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from midstream.audit import Verdict, decide
from midstream.change.trial import TRIAL_EPOCHS
from midstream.checkpoint.change_records import ChangeRecord, Outcome
from midstream.checkpoint.location import Checkpoint
from midstream.flow.model import Graph, KeyBy, Operator, Port, Sink, Source, Union
from midstream.operators.aggregate import Aggregate
from midstream.operators.filter import Filter
from midstream.operators.flat_map import FlatMap
from midstream.operators.join import Join
from midstream.operators.map import Map
from midstream.operators.process import Process
from midstream.operators.route import Route
from midstream.testing import LocalRun
from tests.ledger import Add
from tests.oracle import Row
from tests.simulation.changing_flows import Broken, ChangingCase, Pass, Planned, Remember, since_timer
from tests.simulation.keyed_flows import assert_counted
from tests.simulation.keyed_state import left_of, process_state
from tests.simulation.plan_flows import Inserted, replanned

COLUMNS = ("id", "n", "k", "w", "trace")
TAKEN_BACK = (Outcome.ROLLED_BACK, Outcome.REVERTED)
Seen = Counter[tuple[Any, ...]]
"""What came of a source row: rows in sinks, and entries in the logs of processes."""


class Impossible(Exception):
    """A function would have failed on this row."""


@dataclass(frozen=True)
class Configuration:
    """What the job ran at some time. ``number`` is that of the change which led there, 0 at first."""

    functions: Mapping[str, Any]
    number: int
    graph: Graph


def configurations(case: ChangingCase, history: Sequence[ChangeRecord]) -> list[Configuration]:
    """All that the job has run, in order. What was rolled back was in force for a while, and then no more."""
    current = Configuration(case.functions, 0, case.flow.graph)
    found = [current]
    for record, change in zip(history, case.changes, strict=True):
        if record.outcome in (Outcome.APPLIED, *TAKEN_BACK):
            inserted = {edit.name: edit.function for edit in change.plan if isinstance(edit, Inserted)}
            functions = {**current.functions, **change.functions, **inserted}
            changed = Configuration(functions, record.number, replanned(current.graph, change.plan))
            current = changed if record.outcome is Outcome.APPLIED else current
            found += [changed] if record.outcome is Outcome.APPLIED else [changed, current]
    return found


# ── one row under one configuration ───────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Beginning:
    """Where a row began: it was given by a source, or by a timer of a process that fired after rows of these ids."""

    operator: str
    row: Row | None = None
    key: Any = None
    numbers: tuple[int, ...] = ()

    def given(self, functions: Mapping[str, Any]) -> Row | None:
        """The row; that of a timer tells the version of the process."""
        if self.row is not None:
            return self.row
        made: Row | None = function_of(functions[self.operator]).timed(self.key, self.numbers)
        return made


def expected(graph: Graph, began: Beginning, functions: Mapping[str, Any], epoch: int) -> Seen | None:
    """What comes of a row; None if something fails on it."""
    seen: Seen = Counter()
    rows: dict[Port, list[Row]] = {}
    first = began.given(functions)
    assert first is not None
    try:
        for op in graph:
            taken = [rows[port] for port in op.inputs]
            match op.spec:
                case Sink():
                    seen.update(_in_sink(op.name, epoch, each) for each in taken[0] if "trace" in each)
                    continue
                case Source():
                    given = {"": [first] if op.name == began.operator else []}
                case Process() if isinstance(functions[op.name], Pass):
                    given = {"": [functions[op.name].marked(each) for each in taken[0]]}
                case Process() if isinstance(functions[op.name], Add):
                    given = {}  # what it gives is compared with its state
                case Process():
                    function = functions[op.name]
                    seen.update(("log", op.name, each["k"], function_of(function).version) for each in taken[0])
                    given = {"": [_called(function, each).marked(each) for each in taken[0]]}
                    if op.name == began.operator:
                        given[""].append(first)
                case _:
                    given = _given(op, taken, functions)
            rows.update({port: given.get(port.branch, []) for port in op.ports})
    except Impossible:
        return None
    return seen


def _given(op: Operator, taken: list[list[Row]], functions: Mapping[str, Any]) -> dict[str, list[Row]]:
    """Rows by branch, of an operator without state, a join or an aggregate."""
    function: Any = functions.get(op.name)
    match op.spec:
        case KeyBy() | Union():
            return {"": [each for side in taken for each in side]}
        case Map():
            return {"": [_called(function, each)(each) for each in taken[0]]}
        case Filter():
            return {"": [each for each in taken[0] if function(each)]}
        case FlatMap():
            return {"": [made for each in taken[0] for made in function(each)]}
        case Route(_, branches):
            return {branch: [each for each in taken[0] if function(each) == branch] for branch in branches}
        case Join():
            left, right = taken
            pairs = [(mine, other) for mine in left for other in right if mine["id"] == other["rid"]]
            return {"": [{**mine, "rtrace": other["rtrace"], "rat": other["rat"]} for mine, other in pairs]}
        case Aggregate():
            return {}  # its totals follow from rows that are in a sink as well
    raise AssertionError(f"the oracle does not know {op.kind}")


def function_of(function: Any) -> Any:
    """What stands behind a broken function."""
    return function.inner if isinstance(function, Broken) else function


def _called(function: Any, row: Row) -> Any:
    """The function that a row meets, if that can be."""
    if isinstance(function, Broken) and (function.how != "sometimes" or row["id"] % 2):
        raise Impossible
    return function_of(function)


def _in_sink(sink: str, epoch: int, row: Row) -> tuple[Any, ...]:
    return (sink, epoch, *(row[column] for column in COLUMNS))


# ── what did come ─────────────────────────────────────────────────────────────────────────────────────────────────


def found(case: ChangingCase) -> dict[int, Seen]:
    """By the id of the source row."""
    seen: dict[int, Seen] = defaultdict(Counter)
    for name, sink in case.sinks.items():
        if name not in case.totals:
            for epoch, table in sink.tables.items():
                for row in table.to_pylist():
                    seen[row["id"]][_in_sink(name, epoch, row)] += 1
    for process, key, log in logs(case):
        for number, version, _ in log:
            if number is not None:
                seen[number]["log", process, key, version] += 1
    return seen


def states(case: ChangingCase) -> dict[str, dict[str, Any]]:
    """The state of each process, as its last epoch has left it."""
    graph = case.flow.graph
    left = left_of(case.checkpoint, graph)
    return {op.name: process_state(left[op.name]) for op in graph if isinstance(op.spec, Process)}


def logs(case: ChangingCase) -> Iterator[tuple[str, Any, list[tuple[int | None, int, int]]]]:
    """The log of each process and key."""
    for process, state in states(case).items():
        for ((key,), _), log in state["lists"].items():
            yield process, key, log


def beginnings(case: ChangingCase) -> Iterator[tuple[int, Beginning]]:
    """Where each row that is not made of another one began, with its epoch."""
    epochs: dict[int, int] = {}
    for source, rows in case.epochs.items():
        for epoch, row in ((epoch, row) for epoch, rows in enumerate(rows) for row in rows):
            epochs[row["id"]] = epoch
            yield epoch, Beginning(source, row)
    for process, key, log in logs(case):
        numbers: list[int | None] = []
        for number, _, _ in log:
            if number is None:
                came = tuple(since_timer(numbers))
                if case.functions[process].timed(key, came) is not None:
                    yield epochs[max(came)], Beginning(process, None, key, came)
            numbers.append(number)


def mixtures(case: ChangingCase, run: LocalRun) -> list[str]:
    """Rows that did not go wholly through one configuration, or not in the order of configurations."""
    seen, had = found(case), configurations(case, run.history)
    wrong: list[str] = []
    by_epoch: dict[int, list[Beginning]] = defaultdict(list)
    for epoch, began in beginnings(case):
        by_epoch[epoch].append(began)
    oldest = 0
    for epoch in range(case.length):
        newest = oldest
        for began in by_epoch[epoch]:
            row = began.given(case.functions)
            assert row is not None
            got = seen.pop(row["id"], Counter())
            wanted = [expected(each.graph, began, each.functions, epoch) for each in had]
            fitting = [number for number, answer in enumerate(wanted) if answer == got and number >= oldest]
            if not fitting:
                wrong.append(f"epoch {epoch}: row {row['id']} of {began.operator} gave {dict(got)}")
            else:
                newest = max(newest, fitting[0])
        oldest = newest
    wrong += [f"rows of id {number}, which nobody gave: {dict(got)}" for number, got in seen.items()]
    return wrong


# ── the checks ────────────────────────────────────────────────────────────────────────────────────────────────────


def audited(run: LocalRun) -> Verdict:
    """What the auditor says."""
    assert run.audit is not None
    changes = {each.revision: each.decided_at for each in run.history if each.outcome is not Outcome.REFUSED}
    return decide(run.audit, changes)


def check_changes(case: ChangingCase) -> LocalRun:
    """Run the case and check all that can be; an error shows the whole case."""
    run = case.run()
    try:
        assert_counted([progress.epoch for progress in run.progress], case.length, case.drivers - 1, "counted twice")
        disagreements = [*case.disagreements, *case.ledger.problems(case.checkpoint)]
        assert not disagreements, "\n".join(disagreements[:3])
        if ends_on_trial(case, run):
            return run  # what rows should have met depends on how that ends
        check_history(case, run)
        wrong = mixtures(case, run)
        assert not wrong, "\n".join([f"{len(wrong)} rows met a mixture:", *wrong[:3]])
        verdict = audited(run)
        assert verdict.serialisable, str(verdict)
        check_attempts(case)
        check_logs(case, run)
        check_totals(case)
    except AssertionError as error:
        raise AssertionError(f"{error}\n{case}\n{story(run)}") from error
    return run


def story(run: LocalRun) -> str:
    """The history, for whoever has to find out."""
    return "\n".join(f"  {record} (epoch {record.epoch}, {record.scheduler})" for record in run.history)


def ends_on_trial(case: ChangingCase, run: LocalRun) -> bool:
    """Whether a change is on trial as the run ends: one of its operators gets no rows, and the run is short."""
    found = [record.epoch for record in run.history if record.outcome is Outcome.PENDING and record.epoch is not None]
    return bool(found) and case.length - found[0] <= TRIAL_EPOCHS


def check_history(case: ChangingCase, run: LocalRun) -> None:
    """Every change has come to an end, and to the right one."""
    revisions = [record.revision for record in run.history if record.outcome is not Outcome.REFUSED]
    assert revisions == sorted(set(revisions)), revisions
    for record, change in zip(run.history, case.changes, strict=True):
        allowed = {Outcome.APPLIED} if change.how is None else set(TAKEN_BACK)
        if case.faults.crash_driver or case.faults.lose_run:
            allowed.add(Outcome.REFUSED)  # it waited when the driver died
        if change.how is not None and change.preflight:
            allowed.add(Outcome.REFUSED)
        is_hurried = change.time_limit is not None and case.faults.overdue > 0
        if is_hurried or case.faults.lose_run:
            allowed.update(TAKEN_BACK)
        assert record.outcome in allowed, f"{record.outcome}: {record.error}"
        was_tried = record.outcome is Outcome.REFUSED and not record.edits
        assert was_tried or set(record.operators) == set(change.functions), record
        if record.outcome in TAKEN_BACK or was_tried:
            assert record.error is not None
            reasons = [*change.functions, *(["time limit"] if is_hurried else [])]
            reasons += ["no worker is available"] if case.faults.lose_run else []
            assert any(reason in record.error for reason in reasons), record.error


def check_attempts(case: ChangingCase) -> None:
    """Any of the attempts of a task may be the one that is kept."""
    if not (case.faults.crash_driver or case.faults.lose_run):  # the next driver numbers its runs anew
        for task, (first, *others) in attempts_of(case.checkpoint, case.flow.graph).items():
            assert all(other == first for other in others), f"attempts of {task} differ"


def attempts_of(checkpoint: str, graph: Graph) -> dict[str, list[Seen]]:
    """What each attempt that came to its end has done, row by row; by task."""
    found: dict[str, list[Seen]] = defaultdict(list)
    for file in sorted(Path(Checkpoint.look(checkpoint, graph).audit_location).glob("*.arrow")):
        with pa.ipc.open_file(str(file)) as reader:
            operations = reader.read_all().to_pylist()
        found[file.stem.rpartition("-")[0]].append(Counter(tuple(each.values()) for each in operations))
    return found


def check_logs(case: ChangingCase, run: LocalRun) -> None:
    """Per key, a process was called under configurations in their order, on state of the layout that it wants."""
    had = configurations(case, run.history)
    kept = states(case)
    for process, key, log in logs(case):
        steps = migrations(case, had, process)
        at, layout, moved = 0, None, Counter[int]()
        for number, version, layout_found in log:
            what = f"{process}, key {key!r}, row {number}: {log}"
            before = at
            fitting = [j for j in range(at, len(had)) if function_of(had[j].functions[process]).version == version]
            assert fitting, f"the version is older than that of a row before: {what}"
            at = fitting[0]
            if layout is None:
                layout = function_of(had[at].functions[process]).layout
            else:
                for step in range(before + 1, at + 1):
                    if step in steps:
                        layout = steps[step]
                        moved[layout] += 1
            assert layout_found == layout, f"expected layout {layout}: {what}"
        items = {item: count for (of, _, item), count in kept[process]["items"].items() if of == (key,)}
        assert items == dict(moved), f"{process}, key {key!r}: migrated {items}, not {dict(moved)}"
        assert kept[process]["values"][(key,)] == layout


def migrations(case: ChangingCase, had: Sequence[Configuration], process: str) -> dict[int, int]:
    """The layouts that came with configurations, by their place in the list."""
    changes: dict[int, Planned] = dict(enumerate(case.changes, 1))
    found = {}
    for at, configuration in enumerate(had):
        # When another change was rolled back, a configuration comes again; that is no migration.
        change = changes.pop(configuration.number, None)
        if change is not None and process in change.moves:
            function = change.functions[process]
            assert isinstance(function, Remember)
            found[at] = function.layout
    return found


def check_totals(case: ChangingCase) -> None:
    """Running totals are those of all rows that came, in whatever version."""
    for name, of in case.totals.items():
        rows: Counter[Any] = Counter()
        weights: Counter[Any] = Counter()
        for epoch in range(case.length):
            came = case.sinks[of].tables[epoch].to_pylist()
            for row in came:
                rows[row["k"]] += 1
                weights[row["k"]] += row["w"]
            wanted = {k: (rows[k], weights[k]) for k in {row["k"] for row in came}}
            got = {row["k"]: (row["rows"], row["w"]) for row in case.sinks[name].tables[epoch].to_pylist()}
            assert got == wanted, f"{name}, epoch {epoch}: {got}, not {wanted}"
