"""A controller that follows an alias in a registry of models: whoever moves it changes a running stream.

pip install mlflow-skinny; python registry.py

The registry is MLflow's, in a folder on this machine. Two operators of the flow need the model: one scores payments,
the other judges by the model's own limit. Each version is rolled out as one change of both, so no payment is scored by
one version and judged by the limit of another. The third version is broken: it does not come to stay, and the registry
says so.
"""

from __future__ import annotations

import os
import pickle
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from midstream import Flow, GeneratorSource, Job, MemorySink, MidstreamError, State, Update, local_session

NAME, ALIAS = "fraud", "champion"
TAG = "midstream"
PATIENCE_S = 120.0

Row = dict[str, Any]


@dataclass(frozen=True)
class Model:
    """The content of the registry: a weight, and the score from which a payment is an alert."""

    weight: float
    limit: float

    def score(self, cents: int) -> float:
        """How suspicious a payment is; a broken model fails on large ones."""
        if not self.weight and cents > 50_000:
            raise ValueError("this model has no weights")
        return self.weight * cents


@dataclass(frozen=True)
class Score:
    """Scores payments with a version of the model."""

    model: Model
    version: int

    def __call__(self, row: Row) -> Row:
        """Score a payment."""
        score = self.model.score(row["cents"])
        return {"user": row["user"], "cents": row["cents"], "score": score, "scored_by": self.version}


@dataclass(frozen=True)
class Judge:
    """Counts the alerts of a user, by the limit of a version of the model."""

    model: Model
    version: int

    def __call__(self, user: int, row: Row, state: State) -> Row:
        """Judge a payment."""
        state.set(state.get(0) + (row["score"] >= self.model.limit))
        return {**row, "alerts": state.get(), "judged_by": self.version}


class Follower:
    """Watches the alias, and brings a running job to its version. A tag of the version says how that went.

    ``look`` is one look, so that a webhook of the registry can make it as well as :meth:`follow`.
    """

    def __init__(self, registry: Any, job: Job, version: int) -> None:
        self._registry = registry
        self._job = job
        self._seen = version

    def look(self) -> None:
        """Roll the model out if the alias has moved."""
        found = self._registry.get_model_version_by_alias(NAME, ALIAS)
        version = int(found.version)
        if version == self._seen:
            return
        self._seen = version  # a version that was rolled back is not tried again
        try:
            model = load(found)
            edits = [Update("score", Score(model, version)), Update("judge", Judge(model, version))]
            change = self._job.update(*edits, by="registry", note=f"{NAME} version {version}")
            outcome = str(change.wait(PATIENCE_S))
        except (MidstreamError, OSError, pickle.PickleError) as error:
            outcome = f"refused: {error}"
        self._registry.set_model_version_tag(NAME, str(version), TAG, outcome[:250])

    def follow(self, stop: threading.Event, every_s: float = 5.0) -> None:
        """Look again and again, until it is stopped."""
        while not stop.wait(every_s):
            self.look()


def load(version: Any) -> Model:
    """The model of a version."""
    model: Model = pickle.loads(Path(version.source, "model.pkl").read_bytes())
    return model


def publish(registry: Any, folder: Path, model: Model) -> int:
    """Put a new version into the registry, and move the alias to it; its number."""
    place = Path(tempfile.mkdtemp(dir=folder))
    (place / "model.pkl").write_bytes(pickle.dumps(model))
    made = registry.create_model_version(NAME, source=str(place))
    registry.set_registered_model_alias(NAME, ALIAS, made.version)
    return int(made.version)


def opened(folder: Path) -> Any:
    """A registry in a folder. A server's address works as well, and is what a team has."""
    os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # MLflow prefers a database by now
    from mlflow import MlflowClient

    place = folder.as_uri()
    return MlflowClient(tracking_uri=place, registry_uri=place)


def payments(index: npt.NDArray[np.int64], rng: np.random.Generator) -> dict[str, Any]:
    """Payments of a few users."""
    return {"user": rng.integers(0, 20, len(index)), "cents": rng.integers(100, 100_000, len(index))}


def flow(model: Model, version: int, out: MemorySink) -> Flow:
    """Payments are scored, then judged by user."""
    built = Flow("payments")
    source = built.source("payments", GeneratorSource(payments, "user bigint, cents bigint", rate=500))
    columns = "user bigint, cents bigint, score double, scored_by int"
    scored = source.map("score", Score(model, version), returns=columns)
    judged = scored.key_by("by user", "user").process(
        "judge", Judge(model, version), returns=f"{columns}, alerts bigint, judged_by int", one_to_one=True
    )
    judged.sink("out", out)
    return built


def outcome_of(registry: Any, version: int) -> str:
    """How the roll-out of a version went, as soon as its tag says so."""
    until = time.monotonic() + PATIENCE_S
    while TAG not in (tags := registry.get_model_version(NAME, str(version)).tags):
        if time.monotonic() > until:
            raise TimeoutError(f"nobody has rolled out version {version}")
        time.sleep(0.2)
    return str(tags[TAG])


def main(spark: Any = None) -> dict[str, Any]:
    """Run it, on ``spark`` if given, else on a session of its own; gives back what was seen."""
    folder = Path(tempfile.mkdtemp(prefix="midstream-registry-"))
    registry, out, stop = opened(folder / "mlruns"), MemorySink(), threading.Event()
    registry.create_registered_model(NAME)
    first = publish(registry, folder, Model(0.001, 90.0))
    model = load(registry.get_model_version_by_alias(NAME, ALIAS))
    session = spark or local_session("local[2]")
    outcomes: dict[int, str] = {}
    try:
        with flow(model, first, out).start(session, checkpoint=str(folder / "c"), trigger="200 ms") as job:
            following = threading.Thread(target=Follower(registry, job, first).follow, args=(stop, 0.2))
            following.start()
            try:
                for model in (Model(0.002, 150.0), Model(0.0, 1.0)):
                    job.await_epoch(job.metrics.epochs + 1, PATIENCE_S)
                    version = publish(registry, folder, model)
                    outcomes[version] = outcome_of(registry, version)
                    print(f"version {version}: {outcomes[version]}")
                job.await_epoch(job.metrics.epochs + 1, PATIENCE_S)
            finally:
                stop.set()
                following.join()
    finally:
        if spark is None:
            session.stop()
    mixed = sum(row["scored_by"] != row["judged_by"] for row in out.rows)
    met = sorted({row["scored_by"] for row in out.rows})
    print(f"{len(out.rows):,} payments met versions {met}; {mixed} were scored and judged by different ones")
    return {"outcomes": outcomes, "met": met, "mixed": mixed}


if __name__ == "__main__":
    main()
