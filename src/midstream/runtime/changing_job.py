"""The methods by which users change a job: the part of a job that needs no Spark."""

from __future__ import annotations

import statistics
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from typing import Any

from midstream.change.change import Change
from midstream.change.deployment import Deployment, deployment_of
from midstream.change.explain import Explanation
from midstream.change.prepare import PreparedChange, scheduler_of
from midstream.change.revert import undoing
from midstream.change.trial import Changes, Request
from midstream.checkpoint.change_records import ChangeRecord, whoami
from midstream.checkpoint.location import Checkpoint
from midstream.data.durations import duration
from midstream.flow.edits import Edit
from midstream.flow.model import Graph
from midstream.ids import Revision
from midstream.metrics import EpochProgress
from midstream.operators.builder import Flow

__all__ = ["ChangingJob"]


class ChangingJob(ABC):
    """Changes of a job. All methods may be called from any thread."""

    _changes: Changes
    _checkpoint: Checkpoint

    @property
    @abstractmethod
    def progress(self) -> tuple[EpochProgress, ...]:
        """The most recent epochs, newest last."""

    @abstractmethod
    def _check(self, request: Request) -> PreparedChange:
        """Prepare a change as if it were requested now."""

    @abstractmethod
    def _take(self, request: Request) -> Change:
        """Check a change and enact it as soon as possible."""

    @abstractmethod
    def _require_running(self) -> None:
        """Raise if the job has ended."""

    def update(
        self,
        *edits: Edit,
        scheduler: str = "fries",
        time_limit: str | None = None,
        preflight: bool = True,
        by: str | None = None,
        note: str | None = None,
    ) -> Change:
        """Change the job while it runs: consistently, all or none, and rolled back automatically if it fails.

        Returns as soon as running tasks have been notified; :meth:`Change.wait` waits for the outcome. No row ever
        meets the old version of one updated operator and the new version of another. A change that cannot work is
        refused here, before anything has changed: an unknown operator, a function that cannot be called or sent to
        workers, columns that operators downstream cannot take, or a function that fails in preflight, on a few rows of
        the last epoch with the state of their keys.

        Until an epoch that began under the change is committed, it is on trial: if an epoch fails meanwhile, the change
        is rolled back and the epoch run again without it; nothing is lost or doubled. Only one change is in progress at
        a time; others wait for their turn.

        :param edits: what to change together, in any mixture: :class:`midstream.Update` gives an operator another
            function; :class:`midstream.Insert`, :class:`midstream.Remove` and :class:`midstream.Rewire` change the
            plan; :class:`midstream.Tune` sets knobs.
        :param scheduler: how the change is enacted, see :class:`~midstream.planner.change_plan.Scheduler`.
        :param time_limit: an epoch on trial must be done within this time (``"5 seconds"``) after the change has taken
            effect in it, or the change is rolled back.
        :param preflight: whether functions are called on the driver first; False if they can run on workers only.
        :param by: who requests it, for the history; default: the user of this process.
        :param note: the reason, for the history.
        """
        return self._request(edits, scheduler, time_limit, preflight=preflight, by=by, note=note)

    def _request(
        self,
        edits: tuple[Edit, ...],
        scheduler: str,
        time_limit: str | None,
        *,
        preflight: bool,
        by: str | None,
        note: str | None,
        deploys: bool = False,
    ) -> Change:
        limit = None if time_limit is None else duration(time_limit, "time_limit") / 1e6
        request = Request(
            edits,
            scheduler_of(scheduler),
            by or whoami(),
            time_limit_s=limit,
            preflight=preflight,
            note=note,
            deploys=deploys,
        )
        self._require_running()
        return self._take(request)

    def deploy(
        self,
        flow: Flow | Graph,
        *,
        migrate: Mapping[str, Callable[[Any, Any], None]] | None = None,
        flush: Collection[str] = (),
        state: Mapping[str, Any] | None = None,
        scheduler: str = "fries",
        time_limit: str | None = None,
        preflight: bool = True,
        by: str | None = None,
        note: str | None = None,
    ) -> Change | None:
        """Run what a script says: the difference to what runs becomes one change, with a trial and a way back.

        Operators are compared by their names: those that the script adds, removes, rewires or gives other functions
        change, and all others stay as they are, with their state. Returns None if the job runs all of it already.
        ``print(job.explain_deployment(flow))`` shows what would happen.

        :param flow: the flow as the script now says, of the same name.
        :param migrate: by operator, functions that convert the state of processes whose function changes.
        :param flush: operators that the script removes, and that emit all they hold open before they go.
        :param state: by operator, the initial state of those that the script adds, as for :class:`midstream.Insert`.
        """
        deployment = self._deployment(flow, migrate, flush, state)
        if not deployment.edits:
            return None
        note = note or "deployed"
        return self._request(
            deployment.edits, scheduler, time_limit, preflight=preflight, by=by, note=note, deploys=True
        )

    def _deployment(
        self,
        flow: Flow | Graph,
        migrate: Mapping[str, Callable[[Any, Any], None]] | None = None,
        flush: Collection[str] = (),
        state: Mapping[str, Any] | None = None,
    ) -> Deployment:
        graph = flow.graph if isinstance(flow, Flow) else flow
        return deployment_of(self._changes.newest(), graph, migrate, flush, state)

    def explain_deployment(
        self,
        flow: Flow | Graph,
        *,
        migrate: Mapping[str, Callable[[Any, Any], None]] | None = None,
        flush: Collection[str] = (),
        state: Mapping[str, Any] | None = None,
        scheduler: str = "fries",
    ) -> Explanation | None:
        """Explain what :meth:`deploy` would do, without doing it; None if the job runs what the script says."""
        deployment = self._deployment(flow, migrate, flush, state)
        return self.explain(*deployment.edits, scheduler=scheduler) if deployment.edits else None

    def explain(self, *edits: Edit, scheduler: str = "fries") -> Explanation:
        """Explain a change without making it: what changes together, where it begins, and when it takes effect.

        Makes the same checks as :meth:`update`. ``print`` the result, or draw it: :meth:`Explanation.to_svg`.
        """
        request = Request(edits, scheduler_of(scheduler), whoami())
        recent = [progress.duration_ms for progress in self.progress]
        return Explanation(self._check(request), statistics.median(recent) if recent else None)

    def history(self) -> list[ChangeRecord]:
        """All changes of this job, oldest first: who, when, what, and the outcome. Kept in the checkpoint."""
        return self._checkpoint.changes.records()

    def revert(
        self,
        revision: int,
        *,
        migrate: Mapping[str, Callable[[Any, Any], None]] | None = None,
        scheduler: str = "fries",
        by: str | None = None,
    ) -> Change:
        """Go back to an earlier revision: its functions, tables and columns.

        It is a change like any other, to a new revision. If changes are in progress, it waits for its turn and undoes
        them as well, unless they have been rolled back by then. For a job that can no longer start, use
        ``flow.start(…, revert_to=…)`` or ``midstream revert``.

        :param revision: 1 for the script, or the revision of an applied change.
        :param migrate: by operator, functions that convert the state of processes back to the layout of that revision;
            needed for those whose state was migrated since.
        """
        self._require_running()
        store = self._checkpoint.blobs
        with store.holds.preparing():  # otherwise blobs found here could be removed before they are on record
            undone = undoing(self.history(), Revision(revision), self._changes.newest(), store, migrate)
            request = Request(
                undone.edits,
                scheduler_of(scheduler),
                by or whoami(),
                stored=undone.stored,
                note=f"back to revision {revision}",
                back_to=undone,
            )
            return self._take(request)
