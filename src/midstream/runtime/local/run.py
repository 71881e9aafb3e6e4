"""A run on the local runtime, as tests describe it: what goes wrong, what is changed meanwhile, and what came of it."""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa

from midstream.checkpoint.change_records import ChangeRecord
from midstream.flow.edits import Update
from midstream.ids import Revision
from midstream.metrics import EpochProgress, JobMetrics

__all__ = ["ChangeAt", "Faults", "LocalRun"]


@dataclass(frozen=True)
class Faults:
    """Chances of things going wrong, each per step of a task. An epoch has dozens of steps, or thousands.

    Faults thin out where they come again and again, so that every run ends: at 3% per step, an epoch of 300 steps would
    get through once in ten thousand runs. What ends a run of an epoch (``give_up``, ``overdue``, ``lose_run``,
    ``crash_driver``) comes half as often with every run after the first four of that epoch; what ends an attempt of a
    task (``crash``, ``lose_output``), with every attempt after the first four of that task.
    """

    crash: float = 0.0
    """A task dies before its next slice; another attempt starts from the beginning."""
    speculate: float = 0.0
    """A second attempt of a task starts beside the first, or a third."""
    repeat: float = 0.0
    """A message to the coordinator arrives once more, at some later time."""
    give_up: float = 0.0
    """The driver gives up the run of an epoch and runs it again; tasks of the old run may go on for a while."""
    overdue: float = 0.0
    """The time limit of a change on trial is reached, if it has one. Time does not pass by itself here."""
    lose_run: float = 0.0
    """The run of an epoch fails through nobody's function, as when Spark cannot run its jobs. If that ends the job, it
    is started again."""
    crash_driver: float = 0.0
    """The driver dies, at any step of an epoch and of its commit; another one goes on from the checkpoint."""
    lose: float = 0.0
    """A task is never told that it is to switch."""
    lose_output: float = 0.0
    """The output of a finished task is gone when a task of the next stage, or an outlet, wants to read it. The task is
    run again as another attempt; who has read the output before keeps it, who reads it later gets the new one (as when
    Spark fails to fetch a shuffle block)."""


@dataclass(frozen=True)
class ChangeAt:
    """A change that is requested at some moment of an epoch; a seed decides at which.

    With ``preflight``, its functions are called on a few real rows first, as ``job.update`` does; if one fails there,
    the change is refused, which the history tells, and the run goes on. ``time_limit`` is that of ``job.update``.
    """

    epoch: int
    updates: tuple[Update, ...]
    scheduler: str = "fries"
    preflight: bool = False
    time_limit: str | None = None

    @classmethod
    def of(
        cls,
        epoch: int,
        *updates: Update,
        scheduler: str = "fries",
        preflight: bool = False,
        time_limit: str | None = None,
    ) -> ChangeAt:
        """Make one."""
        return cls(epoch, updates, scheduler, preflight, time_limit)


@dataclass(frozen=True)
class LocalRun:
    """What a run gave, besides what the sinks hold."""

    progress: tuple[EpochProgress, ...]
    metrics: JobMetrics
    revision: Revision
    story: tuple[str, ...]
    history: tuple[ChangeRecord, ...] = ()
    """The changes that were made."""
    audit: pa.Table | None = None
    """Which rows met which operator under which revision, if that was wanted."""
