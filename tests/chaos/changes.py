"""Rounds of kills while a job is changed repeatedly: ``python -m tests.chaos.changes --rounds 3 --kill all``.

After each life of the driver: the rows in a database add up to the state. After each round: every number came out once;
each met one version of all operators; counts per key have no gap; the versions of a key never go back; and the history
has the outcome of each change.
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

import pyarrow.parquet as pq

from midstream.checkpoint.change_records import Outcome
from midstream.checkpoint.location import Checkpoint
from tests.chaos.changing_job import EPOCHS, ROWS
from tests.chaos.job import ledger_of
from tests.chaos.processes import LOCAL, Life, Victim, end, left_behind
from tests.chaos.run import CLUSTER

VICTIMS = {
    "worker": [Victim.WORKER, Victim.WORKER, Victim.DAEMON],
    "driver": [Victim.DRIVER, Victim.DRIVER_PYTHON, Victim.WORKER],
    "executor": [Victim.EXECUTOR, Victim.EXECUTOR],
}
PROGRAM = "tests.chaos.changing_job"


def run_round(kind: str, seed: int, folder: Path) -> tuple[list[str], list[str]]:
    """Run until all epochs are committed; return who was killed when, and what is wrong."""
    rng = random.Random(f"{kind} {seed}")
    master = CLUSTER if kind == "executor" else LOCAL
    victims = rng.sample(VICTIMS[kind], len(VICTIMS[kind]))
    epochs = sorted(rng.sample(range(1, EPOCHS - 2), len(victims)))
    kills = [(victim, epoch, rng.random() * 0.8) for victim, epoch in zip(victims, epochs, strict=True)]
    done: list[str] = []
    wrong: list[str] = []
    try:
        lives = 0
        while True:
            life = Life(folder, lives, master, None, PROGRAM)
            lives += 1
            died = _die(life, folder, kills, rng, done)
            code = 0 if died else life.finish()
            disagreements = ledger_of(folder).problems(str(folder / "checkpoint"))
            wrong += [f"life {lives}, {'; '.join(done)}: {each}" for each in disagreements[:3]]
            if not died:
                wrong += [f"the driver ended with {code}:\n{life.last_words()}"] if code else []
                return done, [*wrong, *problems(folder), *left_behind(folder)]
    except Exception:
        return done, [*wrong, traceback.format_exc()]
    finally:
        end(folder)


def _die(life: Life, folder: Path, kills: list[tuple[Victim, int, float]], rng: random.Random, done: list[str]) -> bool:
    """Kill this life's victims; return whether that has ended it."""
    while kills:
        victim, epoch, later = kills.pop(0)
        begun = folder / "checkpoint" / "spark" / "offsets" / str(epoch)
        if not life.wait_until(begun.exists):
            return False
        time.sleep(later)  # anywhere in the epoch, and so anywhere in a change
        if not life.is_over and life.kill(victim, rng):
            done.append(f"{victim} at {epoch}+{1000 * later:.0f} ms")
            if victim.ends_life:
                return True
    return False


def problems(folder: Path) -> Iterator[str]:
    """All deviations from the expected results."""
    checkpoint = Checkpoint.of_any_flow(str(folder / "checkpoint"))
    newest = checkpoint.newest_manifest()
    assert newest is not None
    rows = [row for part in (folder / "out").glob("[!._]*") for row in pq.ParquetFile(part).read().to_pylist()]
    numbers, wanted = Counter(row["n"] for row in rows), Counter(range((newest.epoch + 1) * ROWS))
    if numbers != wanted:
        yield f"{(wanted - numbers).total()} numbers are missing, {(numbers - wanted).total()} are too many"
    mixtures = [row for row in rows if not row["a"] == row["b"] == row["c"]]
    if mixtures:
        yield f"{len(mixtures)} rows met a mixture, e.g. {mixtures[0]}"
    by_key = defaultdict(list)
    for row in rows:
        by_key[row["k"]].append((row["seen"], row["b"]))
    for key, found in by_key.items():
        found.sort()
        if [seen for seen, _ in found] != list(range(1, len(found) + 1)):
            yield f"the rows of key {key} were not counted one by one"
        if [version for _, version in found] != sorted(version for _, version in found):
            yield f"the versions of key {key} go back"
    records = checkpoint.changes.records()
    for record in records:
        if record.outcome in (Outcome.ROLLED_BACK, Outcome.REVERTED):
            yield f"a change was {record.outcome}, although all were good: {record.error}"
    applied = sum(record.outcome is Outcome.APPLIED for record in records)
    if applied < 2:
        yield f"only {applied} of {len(records)} changes were applied; this proves little"


def main() -> int:
    """Run rounds of one kind, or of each in turn; the exit code is 1 if one went wrong."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--rounds", type=int, default=3, help="how many rounds of each kind (default: %(default)s)")
    options.add_argument("--seed", type=int, default=0, help="the first seed (default: %(default)s)")
    options.add_argument("--kill", choices=[*VICTIMS, "all"], default="all", help="what to kill (default: %(default)s)")
    args = options.parse_args()
    for seed in range(args.seed, args.seed + args.rounds):
        for kind in VICTIMS if args.kill == "all" else [args.kill]:
            folder = Path(tempfile.mkdtemp(prefix="midstream-chaos-"))
            since = time.perf_counter()
            done, wrong = run_round(kind, seed, folder)
            took = time.perf_counter() - since
            state = "WRONG" if wrong else "exact"
            print(f"seed {seed:4d}  {kind:8s}  {took:5.1f} s  {state}  kills: {'; '.join(done)}", flush=True)
            if wrong:
                print("\n".join(wrong))
                print(f"what it left is in {folder}")
                return 1
            shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
