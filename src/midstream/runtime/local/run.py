"""A test's description of a run on the local runtime: faults and changes, and the result."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import pyarrow as pa

from midstream.checkpoint.change_records import ChangeRecord
from midstream.checkpoint.control_log import ControlRecord
from midstream.engine.control_operations import ControlOperation
from midstream.flow.edits import Edit, Reassignment
from midstream.ids import Revision
from midstream.metrics import EpochProgress, JobMetrics
from midstream.observation import Observation
from midstream.runtime.control_handle import ControlHandle

__all__ = ["ChangeAt", "ControlAt", "Faults", "LocalRun", "MigrateAt"]


@dataclass(frozen=True)
class Faults:
    """Probabilities of faults, each per step of a task. An epoch has dozens of steps, or thousands.

    Repeated faults become rarer, so that every run ends: at 3% per step, an epoch of 300 steps would succeed once in
    ten thousand runs. The chance of a fault that ends a run of an epoch (``give_up``, ``overdue``, ``lose_run``,
    ``crash_driver``) halves with every run after the first four of that epoch; that of one that ends an attempt of a
    task (``crash``, ``lose_output``), with every attempt after the first four of that task.
    """

    crash: float = 0.0
    """A task dies before its next slice; another attempt starts from the beginning."""
    speculate: float = 0.0
    """A second or third attempt of a task starts while the first is running."""
    repeat: float = 0.0
    """A message to the coordinator arrives again, at some later time."""
    give_up: float = 0.0
    """The driver gives up the run of an epoch and runs it again; tasks of the old run may continue for a while."""
    overdue: float = 0.0
    """The time limit of a change on trial, if it has one, is reached. Time does not pass by itself here."""
    lose_run: float = 0.0
    """The run of an epoch fails although no function does, as when Spark cannot run its jobs. If that ends the job,
    it is started again."""
    crash_driver: float = 0.0
    """The driver dies, at any step of an epoch or of its commit; another one continues from the checkpoint."""
    lose: float = 0.0
    """The message that tells a task to switch, or to run the handlers of a fast control operation, is lost."""
    lose_executor: float = 0.0
    """One of several executors is lost, with the tasks that it runs and its copy of state; another one, which has
    nothing, takes its place."""
    lose_output: float = 0.0
    """The output of a finished task is lost when a task of the next stage, or an outlet, reads it. The task is run
    again as another attempt; earlier readers keep the old output, later ones get the new one (as when Spark fails to
    fetch a shuffle block)."""


@dataclass(frozen=True)
class ChangeAt:
    """A change that is requested at some moment of an epoch; the seed decides when.

    With ``preflight``, its functions are called on a few real rows first, as ``job.update`` does; if one fails there,
    the change is refused, which the history shows, and the run continues. ``time_limit`` is as in ``job.update``.
    """

    epoch: int
    edits: tuple[Edit, ...]
    scheduler: str = "fries"
    preflight: bool = False
    time_limit: str | None = None

    @classmethod
    def of(
        cls,
        epoch: int,
        *edits: Edit,
        scheduler: str = "fries",
        preflight: bool = False,
        time_limit: str | None = None,
    ) -> ChangeAt:
        """Make a change from its edits."""
        return cls(epoch, edits, scheduler, preflight, time_limit)


@dataclass(frozen=True)
class MigrateAt:
    """A migration that is requested at some moment of an epoch; the seed decides when.

    ``strategy``, ``budget``, ``prewarm``, ``at`` and ``queue`` are as in ``job.migrate``. It is cancelled or reversed
    at some moment of the epochs ``cancel`` and ``reverse``, if it has not ended by then. With ``if_possible`` it may be
    refused, which the history shows; otherwise that is a mistake of the test.
    """

    epoch: int
    edits: tuple[Reassignment, ...]
    strategy: str = "budgeted"
    budget: str | int | None = None
    prewarm: bool = True
    at: int | datetime | None = None
    queue: bool = False
    cancel: int | None = None
    reverse: int | None = None
    if_possible: bool = False

    @classmethod
    def of(cls, epoch: int, *edits: Reassignment, **more: Any) -> MigrateAt:
        """Make a migration from its edits.

        >>> from midstream import Rescale
        >>> MigrateAt.of(3, Rescale(4), strategy="fluid").strategy
        'fluid'
        """
        return cls(epoch, edits, **more)


@dataclass(frozen=True)
class ControlAt:
    """A control operation that is requested at some moment of an epoch; the seed decides when.

    ``handles`` gets its handle when it has been requested. If the driver dies, that handle never ends: the record of a
    blocking operation among ``run.controls`` says how it ended.

    >>> from midstream import ControlOperation
    >>> ControlAt(2, ControlOperation()).epoch
    2
    """

    epoch: int
    operation: ControlOperation
    handles: list[ControlHandle] = field(default_factory=list, compare=False)

    @property
    def handle(self) -> ControlHandle:
        """The handle of the operation."""
        [handle] = self.handles
        return handle


@dataclass(frozen=True)
class LocalRun:
    """The results of a run, in addition to the contents of its sinks."""

    progress: tuple[EpochProgress, ...]
    metrics: JobMetrics
    revision: Revision
    story: tuple[str, ...]
    observations: tuple[Observation, ...] = ()
    """One for each committed epoch, as ``job.watch()`` gives them on Spark."""
    history: tuple[ChangeRecord, ...] = ()
    """The changes that were made."""
    controls: tuple[ControlRecord, ...] = ()
    """The control operations of the last driver, and all blocking ones."""
    audit: pa.Table | None = None
    """In audit mode: which operator processed which row under which revision."""
