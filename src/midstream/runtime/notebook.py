"""A job in a notebook: its card below a cell, updated as epochs are committed."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

from midstream.checkpoint.change_records import ChangeRecord
from midstream.drawing.job_card import CardChange, JobCard
from midstream.errors import MidstreamError
from midstream.flow.model import Graph
from midstream.ids import Revision
from midstream.observation import Observation
from midstream.runtime.watch import Watch

__all__ = ["ShownJob", "card_of", "keep_showing"]

SHOWN_CHANGES = 5


class ShownJob(Protocol):
    """The parts of a job that a card needs."""

    @property
    def graph(self) -> Graph:
        """The running flow."""

    @property
    def revision(self) -> Revision:
        """The revision of its configuration."""

    @property
    def status(self) -> str:
        """Where it is in its life."""

    @property
    def observation(self) -> Observation | None:
        """The observation of the last epoch."""

    @property
    def exception(self) -> Exception | None:
        """Why it failed."""

    def history(self) -> list[ChangeRecord]:
        """Its changes, oldest first."""

    def watch(self) -> Watch:
        """Its observations from now on."""


def card_of(job: ShownJob) -> JobCard:
    """The job as it is now."""
    changes = [
        CardChange(record.number, record.outcome, record.subjects, record.delay_ms, record.note or "")
        for record in reversed(job.history()[-SHOWN_CHANGES:])
    ]
    error = "" if job.exception is None else str(job.exception)
    return JobCard(job.graph, str(job.status), job.revision, job.observation, changes, error)


def keep_showing(job: ShownJob, every_s: float = 1.0) -> threading.Thread:
    """Show the job below the running cell, and update it after epochs, at most every ``every`` seconds, and when the
    job has ended.

    A thread of its own updates it until the job ends, so that other cells can be run meanwhile.
    """
    try:
        from IPython import get_ipython
        from IPython.display import HTML, display
    except ImportError:
        shell = None
    else:
        shell = get_ipython()
    if shell is None:
        raise MidstreamError(
            "display() shows a job in a notebook, and this is not one. In a terminal: midstream top JOB; in a program: "
            "print(job), or job.watch()."
        )
    watch = job.watch()  # before the first look, so that no epoch is missed
    handle = display(HTML(card_of(job).to_html()), display_id=True)  # type: ignore[no-untyped-call]

    def renew() -> None:
        handle.update(HTML(card_of(job).to_html()))  # type: ignore[no-untyped-call]

    thread = threading.Thread(target=_follow, args=(watch, renew, every_s), name="midstream-notebook", daemon=True)
    thread.start()
    return thread


def _follow(watch: Watch, renew: Callable[[], Any], every_s: float, now: Callable[[], float] = time.monotonic) -> None:
    """Update after epochs that are far enough apart, and once at the end."""
    last = now()
    for _ in watch:
        if now() - last >= every_s:
            renew()
            last = now()
    renew()
