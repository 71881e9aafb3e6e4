"""A small Spark job that asks Python workers something before a job starts.

It has a task for each core that Spark knows of, so on an idle cluster every executor answers. It may take long, because
a cluster may have no executor yet; the caller decides how long to wait.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable
from typing import Any

from pyspark import InheritableThread, SparkContext

__all__ = ["MOST_TASKS", "ask_workers"]

MOST_TASKS = 256
"""Most tasks of the job; more would not learn more."""


def ask_workers(
    context: SparkContext, function: Callable[[Iterable[int]], Iterable[Any]], tasks: int, patience_s: float
) -> list[Any] | None:
    """The results of the function in all tasks; None if they take too long. Raises Spark's error if one fails."""
    answers: list[list[Any]] = []
    failures: list[Exception] = []
    tag = f"midstream-probe-{uuid.uuid4().hex}"

    def run() -> None:
        context.addJobTag(tag)
        try:
            answers.append(context.parallelize(range(tasks), tasks).mapPartitions(function).collect())
        except Exception as error:  # one of Spark's many classes of errors
            failures.append(error)

    thread = InheritableThread(target=run, name="midstream-probe", daemon=True)
    thread.start()
    thread.join(patience_s)
    if failures:
        raise failures[0]
    if not answers:
        context.cancelJobsWithTag(tag)
        return None
    return answers[0]
