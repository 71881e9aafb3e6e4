"""Generates the source of a program: one function that runs a transaction in place, one that runs an operation on
versions.

The kernels around them (:mod:`.strategies.loops`) are ordinary functions. Their ``*state`` is replaced with the names
of the arrays, because compiled code is three times as fast with separate arguments as with a tuple. The same source,
not compiled, runs transactions that call Python functions.

Names in the source: ``x_…`` are arrays by transaction, operation or key slot, ``v7`` is node 7, ``k2`` key slot 2,
``E_…`` a column of the event, ``T1_0`` column 0 of table 1, ``N1`` whether a key of table 1 was changed, ``V1_0`` the
versions of that column, ``O_…`` a returned column, ``B1`` … ``L1_0`` the log of table 1, ``K1…`` its key map, ``F0_2``
function 2 of type 0, ``C0_5`` a constant that is an object. ``at`` is the transaction number ``i`` as a subscript. In
compiled code subscripts are unsigned, because a signed one could count from the end of an array, and every access would
have to check for that.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property

from midstream.flow.transactions.expressions import INFIX, ExpressionNode, TransactionType
from midstream.txn.program import Program

__all__ = ["Generated", "adapted", "generate"]

SIMPLE = {**INFIX, "and": "and", "or": "or"}  # on booleans; & of two booleans would also work, but ~ would not
for _special in ("floordiv", "mod"):
    del SIMPLE[_special]


@dataclass(frozen=True)
class Generated:
    """The source of a program's functions, and the names of the arrays that they take, in order."""

    program: Program
    place: tuple[str, ...]  # arguments of `run` after the transaction's number
    version: tuple[str, ...]  # arguments of `run_operation`, `conclude` and `settle`

    @cached_property
    def text(self) -> str:
        """The source of ``run``, and, for versions, of ``run_operation``, ``conclude`` and ``settle``."""
        parts = [_run(self)]
        if not self.program.interpreted:
            parts += [_run_operation(self), _conclude(self), _settle(self)]
        return "\n\n".join(parts) + "\n"


def generate(program: Program) -> Generated:
    """The source of a program's functions."""
    common = ["x_kinds", "x_bases", "x_keys", "x_timestamps", "x_reasons"]
    common += [f"E_{name}" for name in program.columns if program.interpreted or program.columns[name] != "string"]
    common += [f"O_{name}" for name in program.returns]
    for number, table in enumerate(program.tables):
        common.append(f"N{number}")
        common += [f"T{number}_{column}" for column in range(len(table.columns))]
        if number in program.windowed_tables:
            common += [f"{letter}{number}" for letter in ("B", "H", "P", "S", "W")]
            common += [f"L{number}_{column}" for column in range(len(table.columns))]
    late = []
    for number in sorted(program.late_tables):
        late += [f"K{number}"] if program.interpreted else [f"K{number}_{part}" for part in range(5)]
    versions = ["x_origins", "x_owners", "x_starts", "x_older", "x_aborted", "x_verdicts"]
    for number, table in enumerate(program.tables):
        versions += [f"V{number}_{column}" for column in range(len(table.columns))]
    return Generated(program, (*common, *late), (*common, *versions))


def adapted(kernel: Callable[..., object], names: tuple[str, ...], visit: str, name: str) -> str:
    """The source of a kernel under another name, with its ``*state`` spelled out and its ``visit`` replaced."""
    text = inspect.getsource(kernel)
    state = ", ".join(names)
    return (
        text.replace(f"def {kernel.__name__}(", f"def {name}(", 1)
        .replace("*state", state)
        .replace("visit(", f"{visit}(")
    )


# ── functions ─────────────────────────────────────────────────────────────────────────────────────────────────────


def _run(made: Generated) -> str:
    lines = [f"def run(i, {', '.join(made.place)}):", *_prologue(made.program)]
    for number, kind in enumerate(made.program.types):
        body = _Body(made.program, number, versions=False)
        body.slots()
        for position, require in enumerate(kind.requires):
            body.node(require.condition)
            body.add(f"if not v{require.condition}:", f"    x_reasons[at] = {position + 1}", "    return")
        for write in kind.writes:
            body.key(write.slot)
            for value in write.values:
                body.node(value)
        for node in kind.returns.values():
            body.node(node)
        for operation in made.program.operations[number]:
            if operation.slot >= 0:
                body.store(operation.slot, [f"v{value}" for value in operation.nodes])
        for name, node in kind.returns.items():
            body.add(f"O_{name}[at] = v{node}")
        body.add("x_reasons[at] = 0")
        lines += _branch(number, "kind", body.lines)
    return "\n".join(lines)


def _run_operation(made: Generated) -> str:
    """One operation on versions. A check records its verdict; a write its version, or the previous one if aborted."""
    lines = [
        f"def run_operation(o, marking, {', '.join(made.version)}):",
        "    i = x_owners[o]",
        *_prologue(made.program),
        "    step = o - x_starts[at]",
    ]
    for number, operations in enumerate(made.program.operations):
        inner: list[str] = []
        for step, operation in enumerate(operations):
            body = _Body(made.program, number, versions=True)
            if operation.slot < 0:
                (condition,) = operation.nodes
                body.slots(operation.reads)
                body.node(condition)
                body.add(f"x_verdicts[o] = 1 if v{condition} else 2")
                body.add(f"if marking and not v{condition}:", "    x_aborted[at] = 1")
            else:
                _version(body, operation.slot, operation.nodes, operation.reads)
            inner += _branch(step, "step", body.lines)
        lines += _branch(number, "kind", inner or ["pass"])
    return "\n".join(lines)


def _version(body: _Body, slot: int, nodes: tuple[int, ...], reads: tuple[int, ...]) -> None:
    table = body.table(slot)
    columns = range(len(nodes))
    body.slots((slot,))
    body.add("if x_aborted[at]:")
    for column in columns:
        body.add(f"    V{table}_{column}[o] = {body.base_value(slot, column)}")
    body.add("    return")
    body.slots(reads)
    for column, value in zip(columns, nodes, strict=True):
        body.node(value)
        body.add(f"V{table}_{column}[o] = v{value}")


def _conclude(made: Generated) -> str:
    """After all operations: reasons and returned columns. Changes nothing that other transactions may still read."""
    lines = [f"def conclude(i, {', '.join(made.version)}):", *_prologue(made.program), "    o = x_starts[at]"]
    for number, kind in enumerate(made.program.types):
        body = _Body(made.program, number, versions=True)
        for step, operation in enumerate(made.program.operations[number]):
            if operation.require >= 0:
                body.add(
                    f"if x_verdicts[o + {step}] == 2:", f"    x_reasons[at] = {operation.require + 1}", "    return"
                )
        body.add("x_reasons[at] = 0")
        body.slots()
        for name, node in kind.returns.items():
            body.node(node)
            body.add(f"O_{name}[at] = v{node}")
        lines += _branch(number, "kind", body.lines)
    return "\n".join(lines)


def _settle(made: Generated) -> str:
    """After all transactions are concluded: copy the final versions to the tables."""
    lines = [f"def settle(i, {', '.join(made.version)}):", *_prologue(made.program), "    o = x_starts[at]"]
    lines += ["    if x_reasons[at] != 0:", "        return"]
    for number in range(len(made.program.types)):
        body = _Body(made.program, number, versions=True)
        body.slots()
        for step, operation in enumerate(made.program.operations[number]):
            if operation.slot >= 0:
                table = body.table(operation.slot)
                body.store(operation.slot, [f"V{table}_{column}[o + {step}]" for column in range(len(operation.nodes))])
        lines += _branch(number, "kind", body.lines)
    return "\n".join(lines)


def _prologue(program: Program) -> tuple[str, ...]:
    """The start of every function: the transaction's type, and the offset of its key slots."""
    kind, base = "    kind = x_kinds[at]", f"    base = {_subscript(program, 'x_bases[at]')}"
    return f"    at = {_subscript(program, 'i')}", kind, base


def _subscript(program: Program, text: str) -> str:
    """The text as a subscript; interpreted code needs no cast."""
    return text if program.interpreted else f"uint64({text})"


def _branch(number: int, name: str, body: list[str]) -> list[str]:
    """One case of a function: for a kind of transaction, or, inside that, for a step."""
    indent = "    " if name == "kind" else ""
    return [f"{indent}if {name} == {number}:", *(f"{indent}    {line}" for line in body)]


# ── statements ────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass
class _Body:
    """The statements of one type's transaction, or of a part of it. Each node is computed once, where it is first
    needed.
    """

    program: Program
    number: int
    versions: bool
    lines: list[str] = field(default_factory=list)
    done: set[str] = field(default_factory=set)

    @property
    def kind(self) -> TransactionType:
        return self.program.types[self.number]

    def add(self, *lines: str) -> None:
        self.lines.extend(lines)

    def table(self, slot: int) -> int:
        return self.program.table_numbers[self.number][slot]

    def slots(self, wanted: tuple[int, ...] | None = None) -> None:
        """The keys that are known in advance; on versions, also where each key's value comes from."""
        for slot in range(len(self.kind.slots)) if wanted is None else wanted:
            if not self.kind.slots[slot].late:
                self.key(slot)

    def key(self, slot: int) -> None:
        if self._first(f"k{slot}"):
            if self.kind.slots[slot].late:
                self._late_key(slot)
                return
            place = f"base + {_subscript(self.program, str(slot))}"
            self.add(f"k{slot} = {_subscript(self.program, f'x_keys[{place}]')}")
            if self.versions:
                self.add(f"o{slot} = x_origins[{place}]")

    def _late_key(self, slot: int) -> None:
        key, table = self.kind.slots[slot].key, self.table(slot)
        self.node(key)
        if self.program.interpreted:
            self.add(f"k{slot} = K{table}(v{key})")
        else:
            self.add(f"k{slot} = uint64(find_or_add(v{key}, {', '.join(f'K{table}_{part}' for part in range(5))}))")

    def base_value(self, slot: int, column: int) -> str:
        """The value of a key before this transaction."""
        stored = f"T{self.table(slot)}_{column}[k{slot}]"
        version = f"V{self.table(slot)}_{column}[{_subscript(self.program, f'o{slot}')}]"
        return f"{version} if o{slot} >= 0 else {stored}" if self.versions else stored

    def store(self, slot: int, values: list[str]) -> None:
        """Commit one write."""
        table = self.table(slot)
        self.add(f"N{table}[k{slot}] = True")
        self.add(*(f"T{table}_{column}[k{slot}] = {value}" for column, value in enumerate(values)))
        if table not in self.program.windowed_tables:
            return
        mine = [op.slot for op in self.program.operations[self.number] if op.slot >= 0 and self.table(op.slot) == table]
        stride = max(1, self.program.stride[table])
        place = f"B{table} + i * {stride} + {mine.index(slot)}"
        log = f"H{table}, P{table}, S{table}, W{table}"
        self.add(
            f"entry = log_entry(k{slot}, i, {place}, B{table}, {stride}, x_timestamps[at], {log})",
            *(f"L{table}_{column}[entry] = {value}" for column, value in enumerate(values)),
        )

    def node(self, index: int) -> None:
        """Add the statements that compute a node, unless they are there already."""
        if not self._first(f"v{index}"):
            return
        node = self.kind.nodes[index]
        for arg in node.args:
            self.node(arg)
        if node.op == "read":
            self._read(index, node)
        elif node.op == "window":
            self._window(index, node)
        elif node.op == "constant" and node.kind == "object":
            self.add(f"v{index} = C{self.number}_{index}")
        else:
            self.add(f"v{index} = {self._expression(node)}")

    def _read(self, index: int, node: ExpressionNode) -> None:
        slot, column = node.param.slot, node.param.column
        self.key(slot)
        seen = list(self._own_writes(node))
        start = next((place for place in range(len(seen) - 1, -1, -1) if seen[place][0] == slot), None)
        if start is None:
            self.add(f"v{index} = {self.base_value(slot, column)}")
        for other, value in seen[start or 0 :]:
            self.key(other)
            if other == slot:
                self.node(value)
                self.add(f"v{index} = v{value}")
            else:  # an own write that matters only if both keys are equal; not computed otherwise
                inner = replace(self, lines=[], done=set(self.done))
                inner.node(value)
                self.add(
                    f"if k{other} == k{slot}:", *(f"    {line}" for line in inner.lines), f"    v{index} = v{value}"
                )

    def _own_writes(self, node: ExpressionNode) -> Iterator[tuple[int, int]]:
        """The transaction's own writes that a read may see: key slot and value."""
        for write in self.kind.writes[: node.param.after]:
            if self.table(write.slot) == self.table(node.param.slot):
                yield write.slot, write.values[node.param.column]

    def _window(self, index: int, node: ExpressionNode) -> None:
        of = node.param
        table = self.table(of.slot)
        self.key(of.slot)
        column = self.program.tables[table].columns[of.column]
        span = f"x_timestamps[at] - {of.size}, x_timestamps[at]"
        name = "window_best" if of.aggregate in ("min", "max") else "window_total"
        wrapping = column.kind == "bigint" and name == "window_total"  # sums of whole numbers, see WRAPPING
        view = ".view(uint64)" if wrapping else ""
        log = f"P{table}, S{table}, W{table}, L{table}_{of.column}{view}"
        zero = "uint64(0)" if wrapping else "0.0"
        default = repr(column.default) if column.kind == "bigint" else _literal(column.default)
        extra = f"{of.aggregate == 'max'}, {default}" if name == "window_best" else zero
        if self.versions:
            chain = f"o{of.slot}, H{table}[k{of.slot}], x_older, x_owners, x_timestamps, x_aborted"
            versions = f"{chain}, V{table}_{of.column}{view}"
            call = f"versioned_{name}({versions}, {span}, {log}, {extra})"
        else:
            call = f"{name}(H{table}[k{of.slot}], {span}, {log}, {extra})"
        if name == "window_best":
            self.add(f"v{index} = {call}")
            return
        self.add(f"sum{index}, count{index} = {call}")
        if wrapping:
            self.add(f"sum{index} = {'int64_of' if self.program.interpreted else 'int64'}(sum{index})")
        result = {
            "sum": f"sum{index}",
            "count": f"count{index}",
            "mean": f"sum{index} / count{index} if count{index} else {_literal(float(column.default))}",
        }
        self.add(f"v{index} = {result[of.aggregate]}")

    def _expression(self, node: ExpressionNode) -> str:
        args = [f"v{arg}" for arg in node.args]
        if node.kind == "bigint" and node.op in WRAPPING and not self.program.interpreted:
            return WRAPPING[node.op].format(*args)
        if node.op in SIMPLE:
            return f"{args[0]} {SIMPLE[node.op]} {args[1]}"
        match node.op:
            case "column":
                return f"E_{node.param}[at]"
            case "constant":
                return _constant(node)
            case "call":
                return self._call(node, args)
            case "where":
                return f"{args[1]} if {args[0]} else {args[2]}"
            case "min":
                return f"{args[1]} if {args[1]} < {args[0]} else {args[0]}"
            case "max":
                return f"{args[1]} if {args[1]} > {args[0]} else {args[0]}"
        return UNARY[node.op].format(*args)

    def _call(self, node: ExpressionNode, args: list[str]) -> str:
        name = f"F{self.number}_{node.param}"
        if not self.program.interpreted:
            return f"{CASTS[self.kind.functions[node.param].kind]}({name}({', '.join(args)}))"
        return f"{name}({', '.join(f'item({arg})' for arg in args)})"

    def _first(self, name: str) -> bool:
        new = name not in self.done
        self.done.add(name)
        return new


UNARY = {
    "floordiv": "floordiv({}, {})",
    "mod": "modulo({}, {})",
    "floor": "floor({})",
    "neg": "-{}",
    "abs": "abs({})",
    "not": "not {}",
    "to_double": "float64({})",
    "key": "{}",
}
WRAPPING = {
    "add": "int64(uint64({}) + uint64({}))",
    "sub": "int64(uint64({}) - uint64({}))",
    "mul": "int64(uint64({}) * uint64({}))",
    "neg": "int64(uint64(0) - uint64({0}))",
    "abs": "{0} if {0} >= 0 else int64(uint64(0) - uint64({0}))",
}
"""Whole numbers wrap around. In compiled code that holds only for unsigned numbers: the optimiser assumes that
signed ones never overflow."""
CASTS = {"double": "float64", "bigint": "int64", "boolean": "bool"}


def _constant(node: ExpressionNode) -> str:
    if node.kind == "double":
        return f"float64({_literal(node.param)})"
    if node.kind == "bigint":
        return f"int64({node.param})" if node.param > -(2**63) else "int64(-9223372036854775807) - int64(1)"
    return repr(node.param)


def _literal(value: float) -> str:
    if value != value:
        return "nan"
    return {float("inf"): "inf", float("-inf"): "-inf"}.get(value, repr(value))
