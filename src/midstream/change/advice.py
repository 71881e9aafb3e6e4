"""Advice to the user about a change that did not go through: how the job continues, and what to do next.

Pure: a failure and a record in, sentences out. :mod:`.trial` puts them into the record, which ``change.error``, the
command line and the history show.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from midstream.ids import Revision

if TYPE_CHECKING:
    from midstream.change.trial import RunFailure

__all__ = ["after_roll_back", "after_stop", "never_sent"]


def after_roll_back(
    failure: RunFailure, updated: Sequence[str], revision: Revision, *, is_committed: bool = False
) -> str:
    """Advice on a change that was rolled back or reverted; ``revision`` is what the job runs from now on."""
    kept = "Epochs that were committed under the change stay as they are. " if is_committed else ""
    continues = f"The job continues as revision {revision}, with what it ran before the change."
    return f"{kept}{continues} {_what_to_do(failure, updated)}"


def _what_to_do(failure: RunFailure, updated: Sequence[str]) -> str:
    if not updated:
        return (
            "No function was changed, so look for the reason in the error above and in the executors' logs; then move "
            "the bins again, fewer at a time if memory was short."
        )
    new, again = ", ".join(updated), "and request the change again"
    if failure.is_overdue:
        return f"Make the new {new} faster or set a longer time_limit, {again}."
    if failure.is_lost:
        return (
            f"No function failed: Spark lost workers or could not run tasks, several times in a row. Look for the "
            f"reason in the executors' logs (the new {new} may need more memory than they have), {again}."
        )
    if failure.operator is None:
        return f"A sink or a transform failed on rows of the new {new}. Make the two fit, {again}."
    if failure.operator in updated:
        return f"Fix the new function of {failure.operator}, {again}."
    return f"{failure.operator} was not changed, but failed on rows of the new {new}. Make the two fit, {again}."


def after_stop(why: str) -> str:
    """The message for a change on trial whose job has ended.

    >>> after_stop("job 'fraud' has ended")
    "job 'fraud' has ended; the next start with the same checkpoint continues the change, unless changes='drop'"
    """
    return f"{why}; the next start with the same checkpoint continues the change, unless changes='drop'"


def never_sent(why: str) -> str:
    """The message for a change that was still waiting for the one before it.

    >>> never_sent("job 'fraud' has ended")
    "job 'fraud' has ended before it was this change's turn; request it again once the job runs"
    """
    return f"{why} before it was this change's turn; request it again once the job runs"
