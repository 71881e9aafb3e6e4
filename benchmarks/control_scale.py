"""How the control plane grows with the number of tasks (Chi's figure 9), in three parts.

*Alone*: the coordinator hears all messages of a change that takes effect within a run, and all answers to a fast
control operation, from tasks that exist only as their messages. *Orders*: the bytes that tasks of a stage with state
are sent when they start, beside what they would be if each got the lineage of the whole stage. *Sockets*: the real
channel and the real control plane; endpoints in a few processes, with encrypted connections. Fast operations, and one
change, go to all of them: straight from the driver to each (*flat*), and through one relay for every 32 (*tree*).
With relays an endpoint's requests still have a connection of their own to the driver, as those of workers. Last, the
driver *alone with relays*: their connections are real, and the workers behind them are only their messages, so that
many fit on this machine.

All endpoints share the cores of this machine with the driver, so the time until an operation is complete says little
about a cluster. What decides there is modelled from costs that are measured in the run: the driver's CPU time, a
relay's, and four hops.

    python -m benchmarks.control_scale [--quick] [--plot FILE]
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.control_scale_alone import a_change, a_fast_operation, order_bytes, us_per_message
from benchmarks.control_scale_sockets import WORKERS_PER_RELAY, hop_ms, modelled_ms, sockets
from benchmarks.report import arguments, closing_line, table

TASKS = (64, 256, 1_024, 4_096, 8_192)
ENDPOINTS = (1, 8, 64, 512, 2_048, 8_192)
FLAT, TREE, RELAYS = "flat", "tree", "relays"
SHOWN = ("fast_ms", "fast_cpu_ms", "change_ms", "change_cpu_ms")
Found = dict[int, dict[str, float]]


def measured(endpoints: int, way: str) -> dict[str, float] | None:
    """The figures of a number of endpoints; None if this machine cannot hold so many."""
    try:
        return sockets(endpoints, through_relays=way != FLAT, with_workers=way != RELAYS)
    except (TimeoutError, EOFError) as error:
        print(f"{endpoints:,} endpoints, {way}, could not be measured: {type(error).__name__}: {error}")
        return None


def main() -> None:
    """Measure, and print the figures; the last line is JSON."""
    options = arguments(__doc__ or "").parse_args()
    counts, ends = (TASKS[:3], ENDPOINTS[:4]) if options.quick else (TASKS, ENDPOINTS)
    alone = {
        name: {count: us_per_message(begin, count) for count in counts}
        for name, begin in (("change", a_change), ("fast", a_fast_operation))
    }
    sizes = {count: order_bytes(count) for count in counts}
    hop = hop_ms()
    found: dict[str, Found] = {FLAT: {}, TREE: {}, RELAYS: {}}
    for count in ends:
        for way in (RELAYS, FLAT, TREE):
            if (way == FLAT or count > WORKERS_PER_RELAY) and (figures := measured(count, way)) is not None:
                found[way][count] = figures
    relay_cpu = max((each["fast_relay_cpu_ms"] for each in found[TREE].values()), default=0.0)
    for each in found[RELAYS].values():
        each["modelled_ms"] = modelled_ms(each["fast_cpu_ms"], relay_cpu, hop)
    table(
        "The coordinator alone: CPU time of a message, and bytes of an order",
        ("tasks", "change", "fast operation", "an order", "with the whole lineage"),
        [
            (
                f"{count:,}",
                f"{alone['change'][count]} µs",
                f"{alone['fast'][count]} µs",
                f"{sizes[count][0] / count:,.0f} B",
                f"{sizes[count][1] / count:,.0f} B more",
            )
            for count in counts
        ],
    )
    relayed = f"through relays for {WORKERS_PER_RELAY} each"
    for way, through in (
        (FLAT, "straight to each"),
        (TREE, relayed),
        (RELAYS, f"{relayed}, without workers"),
    ):
        table(
            f"The channel, {through}: until all tasks are done, and the driver's CPU time",
            ("endpoints", "fast operation", "CPU", "change", "CPU", "a relay's CPU", "modelled"),
            [
                (f"{count:,}", *(_shown(each.get(key)) for key in (*SHOWN, "fast_relay_cpu_ms", "modelled_ms")))
                for count, each in found[way].items()
            ],
        )
    print(f"a hop: {hop} ms")
    if options.plot:
        _plot(options.plot, alone, found)
    few, many = counts[0], counts[-1]
    closing: dict[str, Any] = {
        "work_growth": max(round(each[many] / each[few], 2) for each in alone.values()),
        "order_bytes": {count: round(size / count) for count, (size, _) in sizes.items()},
        "whole_lineage_bytes": {count: round(size / count) for count, (_, size) in sizes.items()},
        "coordinator_us": alone,
        "hop_ms": hop,
        "sockets": found,
        "relays": -(-ends[-1] // WORKERS_PER_RELAY),
    }
    closing_line("control_scale", {**largest(found, ends[-1]), **closing}, quick=options.quick)


def largest(found: dict[str, Found], endpoints: int) -> dict[str, float | None]:
    """The figures that are asked for: the driver's with relays, and until complete with all endpoints, if they came
    up; beside them those without relays."""
    relays, tree, flat = (found[way].get(endpoints, {}) for way in (RELAYS, TREE, FLAT))
    return {
        f"driver_cpu_{endpoints}_ms": relays.get("fast_cpu_ms"),
        f"modelled_{endpoints}_ms": relays.get("modelled_ms"),
        f"completion_{endpoints}_ms": tree.get("fast_ms"),
        f"completion_{endpoints}_relays_ms": relays.get("fast_ms"),
        f"completion_{endpoints}_flat_ms": flat.get("fast_ms"),
        f"driver_cpu_{endpoints}_flat_ms": flat.get("fast_cpu_ms"),
        f"change_{endpoints}_ms": tree.get("change_ms"),
        f"change_cpu_{endpoints}_ms": relays.get("change_cpu_ms"),
        f"change_cpu_{endpoints}_flat_ms": flat.get("change_cpu_ms"),
    }


def _shown(value: float | None) -> str:
    return "" if value is None else f"{value:,.1f} ms"


def _plot(path: Path, alone: dict[str, dict[int, float]], found: dict[str, Found]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(14, 4))
    for name, values in alone.items():
        left.plot(list(values), list(values.values()), "o-", label=name)
    left.set_ylim(0, 1.5 * max(value for values in alone.values() for value in values.values()))
    left.set_xlabel("tasks")
    left.set_ylabel("µs of the coordinator for a message")
    lines = (
        (middle, FLAT, "fast_cpu_ms", "straight to each: driver's CPU"),
        (middle, TREE, "fast_cpu_ms", "through relays: driver's CPU"),
        (middle, RELAYS, "fast_cpu_ms", "alone with relays: driver's CPU"),
        (middle, RELAYS, "modelled_ms", "alone with relays: modelled"),
        (right, FLAT, "fast_ms", "fast operation, straight to each"),
        (right, TREE, "fast_ms", "fast operation, through relays"),
        (right, FLAT, "change_ms", "change, straight to each"),
        (right, TREE, "change_ms", "change, through relays"),
    )
    for axes, way, key, label in lines:
        if found[way]:
            axes.plot(list(found[way]), [each[key] for each in found[way].values()], "o-", label=label)
    for axes, title in ((middle, "ms of a fast operation"), (right, "ms until complete, all on two cores")):
        axes.set_yscale("log")
        axes.set_xlabel("endpoints")
        axes.set_ylabel(title)
    for axes in (left, middle, right):
        axes.set_xscale("log", base=2)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)


if __name__ == "__main__":
    main()
