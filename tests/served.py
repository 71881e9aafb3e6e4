"""A job that can be served without Spark: its changes are real, its epochs happen when a test says so."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pyarrow as pa
import pytest

from midstream import Flow, ListSource, NoopSink, delete_savepoint, savepoints, take_savepoint
from midstream.change.change import Change
from midstream.change.configuration import first_configuration
from midstream.change.deployment import deployment_of
from midstream.change.explain import Explanation
from midstream.change.prepare import scheduler_of
from midstream.change.revert import undoing
from midstream.change.trial import Changes, Request, RunFailure
from midstream.checkpoint.change_log import ChangeLog
from midstream.checkpoint.change_records import ChangeRecord, whoami
from midstream.checkpoint.savepoints import Savepoint
from midstream.control.messages import Commit
from midstream.data.durations import duration
from midstream.errors import JobFailed, MidstreamError
from midstream.flow.edits import Edit
from midstream.flow.knobs import KNOBS
from midstream.flow.model import Graph
from midstream.ids import Epoch, Revision
from midstream.metrics import EpochProgress, JobMetrics, OperatorStats
from midstream.observation import Observation
from midstream.server.client import JobClient
from midstream.server.serve import JobServer
from midstream.storage.blobs import BlobStore

if TYPE_CHECKING:
    from midstream.runtime.spark.job import Job
    from tests.migrated import SteppedJob

RATES = pa.table({"k": ["a"], "rate": [1.0]})


def small_flow(name: str = "fraud") -> Flow:
    flow = Flow(name)
    stream = flow.source("in", ListSource([[{"n": 1, "k": "a"}]], "n bigint, k string"))
    stream.map("FM", lambda row: row).lookup("rates", RATES, on="k").sink("out", NoopSink())
    return flow


class StandInJob:
    """See the module docstring. ``commit`` ends an epoch successfully, ``fail`` makes it fail."""

    def __init__(self, folder: Path, name: str = "fraud", id: str = "0123456789abcdef0123456789abcdef") -> None:
        self.name, self.id = name, id
        self._store = BlobStore(str(folder / "blobs"))
        self._log = ChangeLog(str(folder / "changes"))
        self.changes = Changes(first_configuration(small_flow(name).graph, self._store, 2), self._store, self._log)
        self.status: Any = "running"
        self.exception: JobFailed | None = None
        self.progress: tuple[EpochProgress, ...] = ()
        self.metrics = JobMetrics()
        self.observation: Observation | None = None
        self.checkpoint = str(folder)
        """Where savepoints are taken: of a job that is not running, because this one has no epochs."""
        self.requested = threading.Event()
        self.limits: list[float | None] = []

    @property
    def graph(self) -> Graph:
        return self.changes.configuration.graph

    @property
    def revision(self) -> Revision:
        return self.changes.configuration.revision

    @property
    def knobs(self) -> dict[str, int | None]:
        tuned = self.changes.configuration.knobs
        return {name: tuned.get(name, knob.default) for name, knob in KNOBS.items()}

    @property
    def on_trial(self) -> Change | None:
        return self.changes.on_trial

    def update(
        self,
        *updates: Edit,
        scheduler: str = "fries",
        time_limit: str | None = None,
        by: str | None = None,
        note: str | None = None,
    ) -> Change:
        self.limits.append(None if time_limit is None else duration(time_limit, "time_limit") / 1e6)
        return self._request(Request(updates, scheduler_of(scheduler), by or whoami(), note=note))

    def explain(self, *updates: Edit, scheduler: str = "fries") -> Explanation:
        return Explanation(self.changes.check(Request(updates, scheduler_of(scheduler), whoami())), 250.0)

    def deploy(
        self,
        flow: Graph,
        *,
        migrate: Mapping[str, Callable[[Any, Any], None]] | None = None,
        flush: Sequence[str] = (),
        state: Mapping[str, Any] | None = None,
        scheduler: str = "fries",
        time_limit: str | None = None,
        by: str | None = None,
        note: str | None = None,
    ) -> Change | None:
        edits = deployment_of(self.changes.newest(), flow, migrate, flush, state).edits
        return self.update(*edits, scheduler=scheduler, time_limit=time_limit, by=by, note=note) if edits else None

    def explain_deployment(
        self,
        flow: Graph,
        *,
        migrate: Mapping[str, Any] | None = None,
        flush: Sequence[str] = (),
        state: Mapping[str, Any] | None = None,
        scheduler: str = "fries",
    ) -> Explanation | None:
        edits = deployment_of(self.changes.newest(), flow, migrate, flush, state).edits
        return self.explain(*edits, scheduler=scheduler) if edits else None

    def history(self) -> list[ChangeRecord]:
        return self._log.records()

    def revert(
        self,
        revision: int,
        *,
        migrate: Mapping[str, Callable[[Any, Any], None]] | None = None,
        scheduler: str = "fries",
        by: str | None = None,
    ) -> Change:
        undone = undoing(self.history(), Revision(revision), self.changes.newest(), self._store, migrate)
        return self._request(
            Request(
                undone.edits,
                scheduler_of(scheduler),
                by or whoami(),
                stored=undone.stored,
                note="back",
                back_to=undone,
            )
        )

    def savepoint(self, name: str, *, note: str | None = None, by: str | None = None) -> Savepoint:
        return take_savepoint(self.checkpoint, name, note=note, by=by)

    def savepoints(self) -> list[Savepoint]:
        return savepoints(self.checkpoint)

    def delete_savepoint(self, name: str) -> Savepoint:
        return delete_savepoint(self.checkpoint, name)

    def commit(self, epoch: int = 0) -> None:
        """Commit an epoch under the current configuration."""
        self.changes.opened(Epoch(epoch))
        met = tuple(OperatorStats(op.name, rows_in=1) for op in self.graph)
        self.changes.committed(Commit(Epoch(epoch), self.revision, met, 1, {}), self.changes.configuration)
        progress = EpochProgress(epoch, self.revision, 0.0, 500.0, (), rows_in=1000, rows_out=900)
        self.progress, self.metrics = (*self.progress, progress), self.metrics.after(progress)

    def fail(self, why: str) -> None:
        """Fail an epoch under the current configuration."""
        self.changes.opened(Epoch(0))
        assert self.changes.failed(RunFailure(why), self.changes.configuration)

    def payload(self, operator: str) -> Any:
        """The object that an operator runs now."""
        return self.graph.payloads[operator]

    def _request(self, request: Request) -> Change:
        try:
            prepared = self.changes.check(request)
        except MidstreamError as error:
            self.changes.refuse(request, error)
            raise
        change = self.changes.request(request, prepared, 0.0)
        self.requested.set()
        return change


class Running:
    """Runs epochs in a thread until the end of the block."""

    def __init__(self, job: SteppedJob) -> None:
        self._job, self._stop = job, threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        while not self._stop.is_set() and self._job.epoch < 60:
            self._job.run()

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


@contextmanager
def served(job: StandInJob, **options: Any) -> Iterator[JobServer]:
    """Serve a job. Closing takes a moment, which tests of other things need not wait for."""
    server = JobServer(cast("Job", job), **options)
    try:
        yield server
    finally:
        threading.Thread(target=server.close).start()


@contextmanager
def client_of_served(job: SteppedJob, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[JobClient]:
    """A client of a job that is served, which commands find as well. Their tables have room for all columns."""
    monkeypatch.setenv("MIDSTREAM_HOME", str(folder / "home"))
    monkeypatch.setenv("COLUMNS", "250")
    with served(cast("StandInJob", job), checkpoint=str(folder / "checkpoint")) as server:
        yield JobClient(server.url, server.token)
