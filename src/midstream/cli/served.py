"""``JOB`` on the command line: finds the job among those served on this machine."""

from __future__ import annotations

from collections.abc import Sequence

from midstream.cli.target import TargetError
from midstream.server.client import JobClient
from midstream.server.registry import ServedEntry, served_jobs

__all__ = ["SHORT", "NoSuchJob", "client_of", "find_job"]

SHORT = 8
"""Digits of a job's id that tables show."""

NONE_SERVED = "No job is served on this machine; start one with flow.start(…, serve=True) or midstream run --serve."


class NoSuchJob(TargetError):
    """No served job has this name or id."""


def find_job(text: str) -> ServedEntry:
    """The job with this name, or whose id starts with this text."""
    entries = served_jobs()
    found = [entry for entry in entries if text in (entry.name, entry.job)]
    found = found or [entry for entry in entries if text and entry.job.startswith(text)]
    if not found:
        served = f"Served are {_listed(entries)}." if entries else NONE_SERVED
        raise NoSuchJob(f"there is no job {text!r}. {served}")
    if len(found) > 1:
        raise TargetError(f"{text!r} may be {_listed(found)}; say which by the beginning of its id.")
    return found[0]


def client_of(text: str) -> JobClient:
    """The client of a job named on the command line."""
    entry = find_job(text)
    return JobClient(entry.url, entry.token)


def _listed(entries: Sequence[ServedEntry]) -> str:
    return ", ".join(f"{entry.name} ({entry.job[:SHORT]})" for entry in entries)
