"""The processes of a round: drivers with their JVMs, executors and Python workers, and how they are killed."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path

import psutil
import pyspark

ROOT = Path(__file__).parents[2]
MARK = "MIDSTREAM_CHAOS"
"""A variable in the environment of all processes of a round; child processes inherit it."""
PATIENCE_S = 300.0
LOCAL = "local[2,8]"
"""Two cores; a task may fail seven times."""
LOOK_EVERY_S = 0.002


class Victim(StrEnum):
    """What is killed."""

    WORKER = "worker"
    """One Python worker."""
    DAEMON = "daemon"
    """The process that the workers are forked from."""
    EXECUTOR = "executor"
    """The JVM of an executor."""
    DRIVER = "driver"
    """All processes, as when the machine fails."""
    DRIVER_PYTHON = "driver's python"
    """The driver without its JVM, which sees it and ends."""
    DRIVER_JVM = "driver's JVM"
    """The JVM without the driver, which sees it and ends."""

    @property
    def ends_life(self) -> bool:
        """Whether the job must be started again."""
        return self in (Victim.DRIVER, Victim.DRIVER_PYTHON, Victim.DRIVER_JVM)


class Hangs(Exception):
    """A driver that neither continues nor ends."""


class Life:
    """A driver from its start to its end. Its output and its JVM's go to a file."""

    def __init__(
        self,
        folder: Path,
        number: int,
        master: str,
        local_state: Path | None,
        program: str = "tests.chaos.job",
    ) -> None:
        self._log = folder / f"driver-{number}.log"
        scratch = folder / "scratch"
        scratch.mkdir(exist_ok=True)
        arguments = [folder, master] if local_state is None else [folder, master, local_state]
        with self._log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", program, *map(str, arguments)],
                cwd=scratch,
                env={
                    **os.environ,
                    MARK: str(folder),
                    "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]),
                    "PYSPARK_PYTHON": sys.executable,
                    "SPARK_HOME": str(spark_home(folder)),
                    "SPARK_LOCAL_DIRS": str(scratch),
                    "SPARK_LOCAL_IP": "127.0.0.1",
                    "TMPDIR": str(scratch),
                },
                stdout=log,
                stderr=log,
                start_new_session=True,  # one signal reaches the driver and its JVM at the same moment
            )
        self._folder = folder

    @property
    def is_over(self) -> bool:
        """Whether the driver has ended."""
        return self.process.poll() is not None

    def wait_until(self, happens: Callable[[], bool]) -> bool:
        """Wait for a condition; False if the driver ends first."""
        deadline = time.monotonic() + PATIENCE_S
        while not happens():
            if self.is_over:
                return False
            if time.monotonic() > deadline:
                raise Hangs(f"nothing happened for {PATIENCE_S:g} s:\n{self.last_words()}")
            time.sleep(LOOK_EVERY_S)
        return True

    def kill(self, victim: Victim, rng: random.Random) -> bool:
        """Kill one such process as soon as there is one; False if the driver ends first."""
        if victim is Victim.DRIVER:
            os.killpg(self.process.pid, signal.SIGKILL)
            end(self._folder)
        elif victim is Victim.DRIVER_PYTHON:
            self.process.kill()
        else:
            found: list[psutil.Process] = []

            def is_there() -> bool:
                found[:] = [one for one in family(self._folder) if _is(one, victim)]
                return bool(found)

            if not self.wait_until(is_there):
                return False
            rng.choice(found).kill()
        if victim.ends_life:
            self.finish()
        return True

    def finish(self) -> int:
        """Wait for its end; return the exit code."""
        try:
            return self.process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            raise Hangs(f"the driver did not end within {PATIENCE_S:g} s:\n{self.last_words()}") from None

    def last_words(self) -> str:
        """The end of its output."""
        return self._log.read_text(errors="replace")[-4000:]


def family(folder: Path) -> list[psutil.Process]:
    """All living processes of a round, whoever their parents are now."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == str(folder) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


def end(folder: Path) -> None:
    """Kill all processes of a round, and wait until they are gone."""
    while remaining := family(folder):
        for process in remaining:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        psutil.wait_procs(remaining, timeout=PATIENCE_S)


def left_behind(folder: Path, patience_s: float = 30.0) -> list[str]:
    """Processes that do not end by themselves after the driver has ended."""
    psutil.wait_procs(family(folder), timeout=patience_s)
    return [f"process {one.pid} is still there: {' '.join(one.cmdline())[:150]}" for one in family(folder)]


def live_through_kills(folder: Path, program: str, rng: random.Random) -> None:
    """Start a job again until all is committed, while a worker, a driver, a worker and a driver's Python are killed.

    Each dies when Spark plans some epoch; the job keeps its checkpoint in ``folder``.
    """
    kills = [(Victim.WORKER, 2), (Victim.DRIVER, 5), (Victim.WORKER, 8), (Victim.DRIVER_PYTHON, 11)]
    try:
        lives, code = 0, -1
        while code != 0:
            life = Life(folder, lives, LOCAL, None, program)
            lives += 1
            died = False
            while kills and not died:
                victim, epoch = kills.pop(0)
                offsets = folder / "checkpoint" / "spark" / "offsets" / str(epoch + rng.randrange(2))
                assert life.wait_until(offsets.exists), life.last_words()
                life.kill(victim, rng)
                died = victim.ends_life
            code = life.finish() if not died else -1
            assert died or code == 0, life.last_words()
    finally:
        end(folder)
    assert lives == 3
    assert left_behind(folder) == []


def spark_home(folder: Path) -> Path:
    """A copy of Spark as installed by pip: a cluster of separate executors writes into this folder."""
    home = folder / "spark"
    if not home.exists():
        home.mkdir()
        for entry in Path(pyspark.__file__).parent.iterdir():
            (home / entry.name).symlink_to(entry)
    return home


def _is(process: psutil.Process, victim: Victim) -> bool:
    try:
        command = " ".join(process.cmdline())
        match victim:
            case Victim.WORKER:  # of a daemon, which may be dead
                return "pyspark.daemon" in command and process.parent().name() != "java"
            case Victim.DAEMON:
                return "pyspark.daemon" in command and process.parent().name() == "java"
            case Victim.EXECUTOR:
                return "CoarseGrainedExecutorBackend" in command
            case Victim.DRIVER_JVM:
                return "org.apache.spark.deploy.SparkSubmit" in command
    except (psutil.Error, AttributeError):  # it is gone, or its parent is
        pass
    return False
