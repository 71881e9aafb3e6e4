"""Tables of served jobs and their changes for the screen."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime
from textwrap import wrap

from rich.console import Console
from rich.table import Table
from rich.text import Text

from midstream.change.revert import TakenBack
from midstream.checkpoint.change_records import ChangeRecord, Outcome
from midstream.cli.served import SHORT
from midstream.control.placement import ExecutorShare
from midstream.drawing.figures import size_text
from midstream.runtime.migration_desk import StageShares
from midstream.server.messages import JobState
from midstream.server.migration_messages import MigrationState
from midstream.server.registry import ServedEntry

__all__ = [
    "assignment_table",
    "jobs_table",
    "migrations_table",
    "outcome_of",
    "print_history",
    "print_state",
    "table_of",
    "taken_back_text",
]

_STYLES = {
    Outcome.APPLIED: "green",
    Outcome.ROLLED_BACK: "bold red",
    Outcome.REVERTED: "bold red",
    Outcome.REFUSED: "red",
    Outcome.STOPPED: "yellow",
    Outcome.REWOUND: "dim",
    Outcome.PENDING: "yellow",
}


def jobs_table(jobs: Sequence[tuple[ServedEntry, JobState | None]]) -> Table:
    """All served jobs, including those that do not answer."""
    table = table_of("name", "id", "pid", "revision", "status", "url")
    for entry, state in jobs:
        revision, status = ("", "no answer") if state is None else (str(state.revision), state.status)
        cells = (entry.name, entry.job[:SHORT], str(entry.pid), revision, status, entry.url)
        table.add_row(*map(Text, cells))  # Text, because a name may look like markup
    return table


def print_state(entry: ServedEntry, state: JobState, console: Console) -> None:
    """One job: a few lines, and its recent epochs."""
    lines = [
        f"{state.name}  {state.status}  revision {state.revision}",
        f"id {state.id}  pid {entry.pid}  {entry.url}",
        f"checkpoint {entry.checkpoint}",
        f"{state.epochs:,} epochs  {state.rows_in:,} rows in  {state.rows_out:,} out since this start",
    ]
    for title, counts in (("errors", state.errors), ("rows ahead of time", state.rows_ahead)):
        if counts:
            lines.append(f"{title}: {', '.join(f'{name} {count:,}' for name, count in counts.items())}")
    if state.on_trial is not None:
        lines.append(f"on trial: {outcome_of(state.on_trial)}")
    if state.error is not None:
        lines.append(f"failed: {state.error}")
    if state.sweep.failed:
        lines.append(
            f"sweeping the checkpoint failed {state.sweep.failed:,} times, {state.sweep.overdue:,} files are "
            f"still to be removed: {state.sweep.error}"
        )
    for stats in state.progress[-1].operators if state.progress else ():
        if stats.note:
            lines.append(f"{stats.operator}: {stats.note}")
    if state.progress and state.progress[-1].phases:
        phases = ", ".join(f"{phase.name} {phase.ms:,.0f}" for phase in state.progress[-1].phases)
        lines.append(f"last epoch, ms: {phases}")
    for line in lines:
        console.print(line, soft_wrap=True, highlight=False, markup=False)
    if state.progress:
        table = table_of("epoch", "revision", "rows in", "rows out", "errors", "ms", "rows/s", justify="right")
        for epoch in state.progress:
            table.add_row(
                str(epoch.epoch),
                str(epoch.revision),
                f"{epoch.rows_in:,}",
                f"{epoch.rows_out:,}",
                f"{epoch.errors:,}",
                f"{epoch.duration_ms:,.0f}",
                f"{epoch.rows_per_s:,.0f}",
            )
        console.print(table)


def print_history(records: Sequence[ChangeRecord], console: Console) -> None:
    """All changes of a job, oldest first: a line with the outcome, and below it what was changed, why and what failed.

    Lines wrap between words at the width of the console.
    """
    for record in records:
        is_refused = record.outcome is Outcome.REFUSED  # so it has no revision of its own
        head = Text(f"revision {record.revision}  " if not is_refused else f"at revision {record.revision}  ")
        head.append(str(record.outcome), _STYLES[record.outcome])
        when = datetime.fromtimestamp(record.requested_at).strftime("%Y-%m-%d %H:%M:%S")
        head.append(f"  {when}", "dim")
        console.print(head)
        for detail in _details(record):
            for line in wrap(
                detail, console.width, initial_indent=" " * 4, subsequent_indent=" " * 4, break_on_hyphens=False
            ):
                console.print(line, soft_wrap=True, highlight=False, markup=False)


def _details(record: ChangeRecord) -> Iterator[str]:
    # A refused change has no edits on record; its plan says what was wanted.
    what = ", ".join(map(str, record.edits)) or record.plan
    delay = "" if record.delay_ms is None else f", in effect after {record.delay_ms:,.1f} ms"
    waited = f", waited {record.waited_ms:,.1f} ms" if record.waited_ms and record.waited_ms >= 1.0 else ""
    trial = "" if record.trial_ms is None else f", on trial for {record.trial_ms:,.1f} ms"
    yield f"{what}, by {record.by} ({record.scheduler}{waited}{delay}{trial})"
    if record.note:
        yield f"note: {record.note}"
    if record.error:
        yield record.error.splitlines()[0]


def outcome_of(record: ChangeRecord) -> str:
    """The outcome of a change, for users.

    >>> from midstream.ids import Revision
    >>> outcome_of(ChangeRecord(1, Revision(2), 0.0, "ann@host", "fries", (), "", Outcome.APPLIED, delay_ms=3.21))
    'revision 2 (): applied, in effect after 3.2 ms'
    """
    text = f"revision {record.revision} ({record.subjects}): {record.outcome}"
    if record.delay_ms is not None:
        text += f", in effect after {record.delay_ms:,.1f} ms"
    return text if record.error is None else f"{text}: {record.error}"


def taken_back_text(taken: TakenBack) -> str:
    """The result of reverting changes of a job that is not running."""
    assert taken.record is not None
    lines = [outcome_of(record) for record in taken.changed if record is not taken.record]
    what = f" ({taken.record.subjects})" if taken.record.edits else ""
    lines.append(
        f"revision {taken.record.revision}{what}: {taken.record.note}; the next start of the job begins with it"
    )
    return "\n".join(lines)


def assignment_table(stage: StageShares) -> Table:
    """The bins, rows, work and state of each partition of a stage."""
    table = table_of("partition", "bins", "rows/s", "busy %", "state", "executor", justify="right")
    table.title = f"{stage.name}: {len(stage.owners)} bins"
    table.title_justify = "left"
    for each in stage.partitions:
        table.add_row(
            str(each.partition),
            f"{each.bins:,}",
            f"{each.rows_per_s:,.0f}",
            f"{100 * each.work:.0f}",
            size_text(each.bytes),
            each.executor or "–",
        )
    return table


def executors_table(found: Sequence[ExecutorShare]) -> Table:
    """Executors, and what each has of the job."""
    table = table_of("executor", "partitions", "bins", justify="right")
    for each in found:
        table.add_row(each.name, str(sum(map(len, each.partitions.values()))), f"{sum(each.bins.values()):,}")
    return table


def migrations_table(found: Sequence[MigrationState]) -> Table:
    """Migrations in progress."""
    table = table_of("number", "what", "strategy", "bins", "steps", "waits for")
    for state in found:
        progress, plan = state.progress, state.record.migration
        table.add_row(
            str(state.record.number),
            Text(state.record.subjects),
            "" if plan is None else plan.strategy,
            f"{progress.bins_done} of {progress.bins}",
            f"{progress.steps_done}" + ("" if progress.steps_left is None else f", {progress.steps_left} left"),
            Text(progress.is_waiting_for or ""),
        )
    return table


def table_of(*titles: str, justify: str = "left") -> Table:
    """A table without lines, with these columns."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    for title in titles:
        table.add_column(title, justify=justify)  # type: ignore[arg-type]
    return table
