"""The changes of the show: a better pair of models, as in table 1 of the Fries paper, and then a broken one.

FM gets a second opinion, which is one more column, and MC weighs three opinions instead of two. One without the other
would make no sense: the old MC does not know the column, the new one cannot do without it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc

from midstream import Update

from .flow import SCORED_BY_FM
from .models import Combine, FraudModel, Models

if TYPE_CHECKING:
    from midstream import Change, Job

CHANGE_AT, BREAK_AT = 0.4, 0.6
"""When they come, as shares of the payments."""
TOO_MUCH = 200.0
"""About one payment in fifty: a trial of ten short epochs is sure to meet some."""
PATIENCE_S = 60.0
CHECKS_MS = 40.0
"""About what it takes to check a change with models of some megabytes, before tasks are told."""


@dataclass(frozen=True)
class TwoOpinions:
    """The new FM: both models of merchants, one after the other."""

    first: FraudModel
    second: FraudModel
    version: int = 2

    def open(self) -> None:
        """Load both classifiers."""
        self.first.open()
        self.second.open()

    def __call__(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Score a slice of payments twice."""
        return self.second(self.first(batch, self.version))


@dataclass(frozen=True)
class Broken:
    """A model that works on almost all payments."""

    model: TwoOpinions

    def open(self) -> None:
        """Load what it has."""
        self.model.open()

    def __call__(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Fail on large payments."""
        if pc.max(batch["amount"]).as_py() > TOO_MUCH:
            raise ValueError(f"this model was never trained on payments above {TOO_MUCH:,.0f}")
        return self.model(batch)


def better_pair(models: Models) -> tuple[Update, Update]:
    """The change that makes sense only as a whole."""
    merchant = TwoOpinions(models.merchant, models.second_opinion)
    combine = Combine({"p_customer": 0.4, "p_merchant_2": 0.4, "p_merchant": 0.2}, version=2, forgets=("p_merchant_2",))
    return Update("FM", merchant, returns=f"{SCORED_BY_FM}, p_merchant_2 double"), Update("MC", combine)


@dataclass
class Show:
    """Makes the changes while the job runs, and remembers what came of them."""

    job: Job
    models: Models
    payments: int
    better: Change | None = None
    broken: Change | None = None

    def begin(self) -> threading.Thread:
        """Start; ends by itself."""
        thread = threading.Thread(target=self._run, name="show", daemon=True)
        thread.start()
        return thread

    def _run(self) -> None:
        if self._await(CHANGE_AT):
            self.better = self.job.update(*better_pair(self.models), note="a second opinion on merchants")
            self.better.wait(PATIENCE_S)
        if self._await(BREAK_AT):
            model = Broken(TwoOpinions(self.models.merchant, self.models.second_opinion))
            # Tried on a few payments it would work, or be refused; this is about what only some payments bring about.
            self.broken = self.job.update(Update("FM", model), preflight=False, note="deployed on a Friday")
            self.broken.wait(PATIENCE_S)

    def _await(self, share: float) -> bool:
        """Wait until this share of the payments is judged; false if the job ends before."""
        while self.job.metrics.rows_in < share * self.payments:
            if not self.job.await_epoch(self.job.metrics.epochs + 1, PATIENCE_S):
                return False
        time.sleep(self._until_fm_works_s())
        return True

    def _until_fm_works_s(self) -> float:
        """From the beginning of an epoch, how long to wait so that a change comes when the tasks of FM are at work.

        They need not be: a change that comes at another moment has no task to wait for, and nothing to show. It is a
        guess from the last epoch; :attr:`midstream.Change.met` says what the change has met.
        """
        stages = [phase for phase in self.job.progress[-1].phases if phase.name.startswith("stage")]
        middle = (stages[-1].began_ms + stages[-1].ended_ms) / 2 if stages else 0.0
        return max(0.0, middle - CHECKS_MS) / 1000

    def lines(self, old: int, new: int, mixtures: int) -> Iterator[tuple[str, str]]:
        """What to tell: alerts of the old and of the new pair, and payments that met a mixture."""
        if self.better is not None and self.better.delay_ms is not None:
            yield (
                "changed",
                f"FM and MC under load, {self.better.outcome}: in effect {self.better.delay_ms:.1f} ms after "
                f"{self.better.record.preparation_ms:.0f} ms of checks",
            )
            yield "", f"it {self.better.met}"
            yield "", f"{old:,} alerts are the old pair's, {new:,} the new one's"
            yield "mixtures", f"{mixtures:,} of {self.job.metrics.rows_in:,} payments met the old FM and the new MC"
        if self.broken is not None:
            cause = next((line for line in (self.broken.error or "").splitlines() if "Error" in line), "")
            yield "broken", f"the next FM was {self.broken.outcome}: {cause.rpartition(': ')[2]}"
            yield "", "its epoch was run again without it; no payment was lost or judged twice"
