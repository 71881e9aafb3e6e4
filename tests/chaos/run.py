"""Rounds of kills on Spark, each against the oracle: ``python -m tests.chaos.run --rounds 5 --seed 0 --kill all``.

A round draws its input, and what is killed when, from its seed; lets the job finish, starting it again after its driver
was killed; and compares sinks, state and files with the oracle. A kill waits for an event (a file of an epoch
appears) and perhaps a little longer, so a seed that is run again kills at the same point, if not at the same instant.
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.chaos.check import SINKS, problems, rows_read
from tests.chaos.events import write_events
from tests.chaos.job import ledger_of
from tests.chaos.processes import LOCAL, Life, Victim, end, left_behind

KINDS = ("worker", "driver", "executor")
CLUSTER = "local-cluster[2,1,1024]"
STEPS = 10

# What appears during an epoch, in this order; files of sinks are put in place once the manifest is written.
SIGNS = {
    "offsets": "checkpoint/spark/offsets/{epoch}",
    "state": "checkpoint/state/*/{epoch:010d}-*",
    "manifest": "checkpoint/epochs/{epoch:010d}",
    **{f"sink {sink}": f"out/{sink}/epoch-{{epoch:010d}}-*" for sink in SINKS},
    "commit": "checkpoint/spark/commits/{epoch}",
}


@dataclass(frozen=True)
class Kill:
    """A kill: the victim, and the time after a sign of an epoch appears."""

    victim: Victim
    epoch: int
    sign: str
    delay_s: float

    def __str__(self) -> str:
        return f"{self.victim} at {self.epoch} {self.sign}+{1000 * self.delay_s:.0f} ms"


@dataclass(frozen=True)
class Plan:
    """Everything that a seed decides."""

    kind: str
    seed: int
    steps: int
    kills: tuple[Kill, ...]
    keeps_local_state: bool
    """Whether the workers' copies of state outlive the driver, in whatever condition."""

    @property
    def master(self) -> str:
        """Where the job runs."""
        return CLUSTER if self.kind == "executor" else LOCAL


def plan_of(kind: str, seed: int, steps: int = STEPS) -> Plan:
    """The plan of a seed."""
    rng = random.Random(f"{kind} {seed}")
    match kind:
        case "worker":
            victims = rng.choices([Victim.WORKER, Victim.DAEMON], [5, 1], k=rng.randint(3, 5))
        case "executor":
            victims = [Victim.EXECUTOR] * rng.randint(2, 3)
        case "driver":
            victims = rng.choices([Victim.DRIVER, Victim.DRIVER_PYTHON, Victim.DRIVER_JVM], [4, 1, 1], k=2)
            if rng.random() < 0.5:
                victims.insert(rng.randrange(3), Victim.WORKER)
        case _:
            raise ValueError(f"cannot kill {kind!r}; allowed: {', '.join(KINDS)}")
    return Plan(kind, seed, steps, tuple(_kills(rng, victims, steps)), rng.random() < 0.5)


def _kills(rng: random.Random, victims: list[Victim], steps: int) -> Iterator[Kill]:
    epochs = sorted(rng.sample(range(steps), len(victims)))
    for victim, epoch in zip(victims, epochs, strict=True):
        yield Kill(victim, epoch, rng.choice(list(SIGNS)), rng.choice([0, 0, 0.05, 0.3]) * rng.random())


@dataclass
class Outcome:
    """The result of a round."""

    done: list[str]
    lives: int
    problems: list[str]


def run_round(plan: Plan, folder: Path) -> Outcome:
    """Run a plan in an empty folder. Whatever happens, none of its processes is left."""
    folder = folder.resolve()
    write_events(folder / "in", plan.seed, plan.steps)
    rng = random.Random(plan.seed)
    outcome = Outcome([], 0, [])
    try:
        _live(plan, folder, rng, outcome)
        if not outcome.problems:
            outcome.problems += [*problems(folder, len(outcome.done)), *left_behind(folder)]
    except Exception:  # a driver that hangs, a state that cannot be read: also a failure, reported with its seed
        outcome.problems.append(traceback.format_exc())
    finally:
        end(folder)
    return outcome


def _live(plan: Plan, folder: Path, rng: random.Random, outcome: Outcome) -> None:
    """Run one life after the other, until one finishes."""
    kills = list(plan.kills)
    while True:
        life = Life(folder, outcome.lives, plan.master, folder / "local" if plan.keeps_local_state else None)
        outcome.lives += 1
        ended = False
        while kills and not ended:
            kill = kills.pop(0)
            pattern = SIGNS[kill.sign].format(epoch=kill.epoch)
            if not life.wait_until(lambda: any(folder.glob(pattern))):  # noqa: B023 (called before the next one)
                break
            time.sleep(kill.delay_s)
            if not life.is_over and life.kill(kill.victim, rng):
                outcome.done.append(str(kill))
                ended = kill.victim.ends_life
        if not ended and (code := life.finish()):
            outcome.problems.append(f"the driver ended with {code}:\n{life.last_words()}")
        disagreements = ledger_of(folder).problems(str(folder / "checkpoint"))
        outcome.problems += [f"life {outcome.lives}, {'; '.join(outcome.done)}: {each}" for each in disagreements[:3]]
        if not ended:
            return


def main() -> int:
    """Run rounds of one kind, or of each in turn; the exit code is 1 if one went wrong."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--rounds", type=int, default=5, help="how many rounds of each kind (default: %(default)s)")
    options.add_argument("--seed", type=int, default=0, help="the first seed (default: %(default)s)")
    options.add_argument("--kill", choices=[*KINDS, "all"], default="all", help="what to kill (default: %(default)s)")
    options.add_argument("--keep", action="store_true", help="keep the folder of a round that went wrong")
    args = options.parse_args()
    began, kills = time.perf_counter(), 0
    for seed in range(args.seed, args.seed + args.rounds):
        for kind in KINDS if args.kill == "all" else [args.kill]:
            plan = plan_of(kind, seed)
            folder = Path(tempfile.mkdtemp(prefix="midstream-chaos-"))
            since = time.perf_counter()
            outcome = run_round(plan, folder)
            kills += len(outcome.done)
            print(
                f"seed {seed:4d}  {kind:8s}  {time.perf_counter() - since:5.1f} s  {outcome.lives} lives  "
                f"{rows_read(folder)} rows  {'WRONG' if outcome.problems else 'exact'}  "
                f"{len(outcome.done)} of {len(plan.kills)} kills: {'; '.join(outcome.done)}",
                flush=True,
            )
            if not (outcome.problems and args.keep):
                shutil.rmtree(folder)
            if outcome.problems:
                print("\n".join([str(plan), *outcome.problems]))
                print(f"to see it again: python -m tests.chaos.run --kill {kind} --seed {seed} --rounds 1 --keep")
                if args.keep:
                    print(f"what it left is in {folder}")
                return 1
    took = time.perf_counter() - began
    print(f"{args.rounds} rounds of each kind from seed {args.seed}, {kills} kills, {took:.0f} s: all exact")
    return 0


if __name__ == "__main__":
    sys.exit(main())
