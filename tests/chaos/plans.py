"""Rounds of random changes of a plan while processes are killed: ``python -m tests.chaos.plans --kill all``.

SMQ of Bartnik et al. on Spark. At the end: every number went through exactly one plan, the counts of each instance are
1, 2, 3, … and in the order of the numbers of each share of the source, those of the second counter likewise, across all
times that it was removed and came back; and no change was rolled back, since all are good.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import pyarrow.compute as pc
import pyarrow.dataset as ds

from benchmarks.workloads import smq
from midstream.checkpoint.change_records import ChangeRecord, Outcome
from midstream.checkpoint.location import Checkpoint
from tests.chaos.job import PARTITIONS
from tests.chaos.plan_job import CHANGES, noted
from tests.chaos.processes import LOCAL, Life, Victim, end, left_behind
from tests.chaos.run import CLUSTER

PROGRAM = "tests.chaos.plan_job"
VICTIMS = {
    "worker": (Victim.WORKER, Victim.WORKER, Victim.DAEMON),
    "driver": (Victim.WORKER, Victim.WORKER, Victim.WORKER, Victim.DAEMON, Victim.DRIVER, Victim.DRIVER_PYTHON),
    "executor": (Victim.EXECUTOR,),
}
"""Whom each kind of round kills, each as likely as the others."""
APART = (5, 15)
"""Epochs from one kill to the next."""


@dataclass
class Round:
    """What was done, and what is wrong."""

    changes: int = 0
    lives: int = 0
    kills: list[str] = field(default_factory=list)
    rows: int = 0
    lost: int = 0
    doubled: int = 0
    problems: list[str] = field(default_factory=list)

    @property
    def drivers(self) -> int:
        """How many drivers were killed."""
        return self.lives - 1


def run_round(kind: str, seed: int, changes: int, folder: Path, apart: tuple[int, int] = APART) -> Round:
    """Make this number of changes, with kills, in an empty folder. None of its processes is left."""
    done, rng, folder = Round(), random.Random(f"plans {kind} {seed}"), folder.resolve()
    master = CLUSTER if kind == "executor" else LOCAL
    (folder / CHANGES).write_text(str(changes))
    try:
        epoch = 0
        while True:
            life = Life(folder, done.lives, master, None, PROGRAM)
            done.lives += 1
            died = False
            while not died:
                epoch += rng.randint(*apart)
                victim = rng.choice(VICTIMS[kind])
                begun = folder / "checkpoint" / "spark" / "offsets" / str(epoch)
                if not life.wait_until(begun.exists):
                    break
                later = rng.random() * 0.4
                time.sleep(later)  # anywhere in the epoch, and so anywhere in a change
                if not life.is_over and life.kill(victim, rng):
                    done.kills.append(f"{victim} at {epoch}+{1000 * later:.0f} ms")
                    died = victim.ends_life
            if not died:
                if code := life.finish():
                    done.problems.append(f"the driver ended with {code}:\n{life.last_words()}")
                else:
                    judge(folder, done)
                    done.problems += left_behind(folder)
                return done
    except Exception:  # a driver that hangs, a checkpoint that cannot be read: reported with the seed
        done.problems.append(traceback.format_exc())
        return done
    finally:
        end(folder)


def judge(folder: Path, done: Round) -> None:
    """Compare what came out with what went in."""
    checkpoint = Checkpoint.of_any_flow(str(folder / "checkpoint"))
    newest = checkpoint.newest_manifest()
    assert newest is not None
    made = []
    for record in checkpoint.changes.records():
        if record.outcome is Outcome.APPLIED:
            made.append(record)
        elif record.outcome is not Outcome.REFUSED:
            done.problems.append(f"a change was {record.outcome}, although all were good: {record.error}")
    ends = [_end(folder / "checkpoint" / "spark" / "offsets" / str(epoch)) for epoch in range(newest.epoch + 1)]
    rows = ds.dataset(folder / "out", exclude_invalid_files=True).to_table()
    rows = rows.filter(pc.less(rows["n"], ends[-1]))
    verdict = smq.verdict(rows, ends, _course(made), partitions=PARTITIONS, tolerance=1)
    done.changes, done.rows, done.lost, done.doubled = len(made), verdict.rows, verdict.lost, verdict.doubled
    done.problems += verdict.problems
    if verdict.lost or verdict.doubled:
        done.problems.append(f"{verdict.lost} rows are lost, {verdict.doubled} doubled")


def _course(made: list[ChangeRecord]) -> list[tuple[smq.Change, int]]:
    plans = [smq.BASE, *(noted(record.note or "") for record in made)]
    return [
        (smq.Change(before, after), record.epoch or 0)
        for (before, after), record in zip(pairwise(plans), made, strict=True)
    ]


def _end(log: Path) -> int:
    """Up to which number an epoch goes, by Spark's log."""
    index: int = json.loads(log.read_text().splitlines()[-1])["index"]
    return index


def main() -> int:
    """Run rounds; the exit code is 1 if one went wrong."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--rounds", type=int, default=1, help="how many rounds (default: %(default)s)")
    options.add_argument("--changes", type=int, default=100, help="changes of each (default: %(default)s)")
    options.add_argument("--seed", type=int, default=0, help="the first seed (default: %(default)s)")
    options.add_argument("--kill", choices=[*VICTIMS, "all"], default="all", help="what to kill (default: %(default)s)")
    args = options.parse_args()
    for seed in range(args.seed, args.seed + args.rounds):
        for kind in VICTIMS if args.kill == "all" else [args.kill]:
            folder, since = Path(tempfile.mkdtemp(prefix="midstream-chaos-")), time.perf_counter()
            done = run_round(kind, seed, args.changes, folder)
            print(
                f"seed {seed:4d}  {kind:8s}  {time.perf_counter() - since:5.1f} s  "
                f"{'WRONG' if done.problems else 'exact'}  {done.changes} changes, {done.rows} rows, "
                f"{done.lives} lives, kills: {'; '.join(done.kills)}",
                flush=True,
            )
            if done.problems:
                print("\n".join([*done.problems, f"what it left is in {folder}"]))
                return 1
            shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
