"""A client for a job in another process, with ``status``, ``explain``, ``update``, ``history``, ``revert``,
``migrate`` and ``control``.

Uses only the standard library, so that changing a job does not require the server's packages.
"""

from __future__ import annotations

import http.client
import time
from collections.abc import Callable, Collection, Mapping
from datetime import datetime
from typing import Any, TypeVar
from urllib.parse import quote, urlencode, urlsplit

import msgspec

from midstream import errors
from midstream.change.migration_goals import Goal
from midstream.checkpoint.change_records import ChangeRecord, Outcome, whoami
from midstream.checkpoint.control_log import ControlRecord
from midstream.control.placement import ExecutorShare
from midstream.controllers.controller import Controller
from midstream.controllers.proposal_records import ControllerState, ProposalRecord
from midstream.engine.control_operations import ControlOperation
from midstream.errors import FlowError, MidstreamError
from midstream.flow.edits import Edit, check_edits
from midstream.flow.model import Graph
from midstream.observation import Observation
from midstream.operators.builder import Flow
from midstream.runtime.migration_desk import StageShares
from midstream.server.control_messages import ControlRequest, ControlState
from midstream.server.controller_messages import AttachRequest
from midstream.server.messages import (
    ChangeRequest,
    Deployed,
    DeployRequest,
    EditMessage,
    ErrorReply,
    Explained,
    JobState,
    MigrationFunction,
    RevertRequest,
    SavepointRequest,
    SavepointState,
    message_of,
    packed_states,
    python_version,
)
from midstream.server.migration_messages import (
    FreezeRequest,
    Frozen,
    MigrationExplained,
    MigrationState,
    MigrationTurn,
    MigrationWish,
    goal_messages,
)

__all__ = ["JobClient", "is_over"]

T = TypeVar("T")

ANSWER_S = 120.0
"""Seconds that a job may take to answer. It stores functions first, and waits for an epoch that is being committed."""
POLL_S = 5.0
LARGEST = 256 * 1024 * 1024


def is_over(record: ChangeRecord) -> bool:
    """Whether the outcome of a change is final here: it has one, or the job has ended."""
    return record.outcome is not Outcome.PENDING or record.error is not None


class JobClient:
    """A served job. An error that the job raises for a request is raised here as the same class."""

    def __init__(self, url: str, token: str) -> None:
        self.url = url
        self._token = token

    def __repr__(self) -> str:
        return f"JobClient({self.url!r})"

    def status(self, timeout: float = ANSWER_S) -> JobState:
        """The state of the job."""
        return self._ask("GET", "/status", JobState, timeout=timeout)

    def observation(self) -> Observation | None:
        """The observation of the last committed epoch; None before the first."""
        return self._ask("GET", "/observation", Observation | None)  # type: ignore[arg-type]  # a union is no class

    def graph(self, style: str = "text") -> str:
        """The flow that runs, as a drawing."""
        return self._send("GET", f"/graph?{urlencode({'format': style})}", b"", ANSWER_S).decode()

    def explain(self, *edits: Edit, scheduler: str = "fries") -> Explained:
        """Explain a change without making it."""
        body = ChangeRequest(_packed(edits), python_version(), scheduler)
        return self._ask("POST", "/explain", Explained, body)

    def update(
        self,
        *edits: Edit,
        scheduler: str = "fries",
        time_limit: str | None = None,
        by: str | None = None,
        note: str | None = None,
    ) -> ChangeRecord:
        """Change the job; returns the change as soon as running tasks have been notified. See :meth:`wait`."""
        body = ChangeRequest(_packed(edits), python_version(), scheduler, time_limit, by or whoami(), note)
        return self._ask("POST", "/update", ChangeRecord, body)

    def history(self) -> list[ChangeRecord]:
        """All changes, oldest first."""
        return self._ask("GET", "/history", list[ChangeRecord])

    def revert(
        self,
        revision: int,
        *,
        migrate: Mapping[str, Callable[[Any, Any], None]] | None = None,
        scheduler: str = "fries",
        by: str | None = None,
    ) -> ChangeRecord:
        """Go back to an earlier revision. See :meth:`wait`."""
        steps = tuple(MigrationFunction.of(operator, function) for operator, function in (migrate or {}).items())
        body = RevertRequest(revision, python_version(), steps, scheduler, by or whoami())
        return self._ask("POST", "/revert", ChangeRecord, body)

    def savepoint(self, name: str, *, note: str | None = None, by: str | None = None) -> SavepointState:
        """Name the last committed epoch, and keep it."""
        return self._ask("POST", "/savepoints", SavepointState, SavepointRequest(name, note, by or whoami()))

    def savepoints(self) -> list[SavepointState]:
        """All savepoints, oldest epoch first."""
        return self._ask("GET", "/savepoints", list[SavepointState])

    def delete_savepoint(self, name: str) -> SavepointState:
        """Delete a savepoint."""
        return self._ask("DELETE", f"/savepoints/{quote(name, safe='')}", SavepointState)

    def deploy(
        self,
        flow: Flow | Graph,
        *,
        migrate: Mapping[str, Callable[[Any, Any], None]] | None = None,
        flush: Collection[str] = (),
        state: Mapping[str, Any] | None = None,
        scheduler: str = "fries",
        time_limit: str | None = None,
        by: str | None = None,
        note: str | None = None,
        plan_only: bool = False,
    ) -> Deployed:
        """Run what a script says; or with ``plan_only`` only say what that would change. See :meth:`wait`."""
        described, payloads = DeployRequest.packed(flow.graph if isinstance(flow, Flow) else flow)
        body = DeployRequest(
            described,
            payloads,
            python_version(),
            tuple(MigrationFunction.of(operator, function) for operator, function in (migrate or {}).items()),
            scheduler,
            time_limit,
            by or whoami(),
            note,
            plan_only,
            tuple(flush),
            packed_states(state),
        )
        return self._ask("POST", "/deploy", Deployed, body)

    def wait(self, number: int, timeout: float | None = None) -> ChangeRecord:
        """Wait for the outcome of a change; it is still pending if the time runs out, or if the job has ended."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            left = POLL_S if deadline is None else min(POLL_S, max(0.0, deadline - time.monotonic()))
            record = self._ask("GET", f"/history/{number}?wait_s={left:.3f}", ChangeRecord)
            if is_over(record) or (deadline is not None and time.monotonic() >= deadline):
                return record

    # ── migrations ────────────────────────────────────────────────────────────────────────────────────────────────

    def migrate(self, *goals: Goal, **how: Any) -> MigrationState:
        """Give bins other owners, step by step; takes what :meth:`midstream.Job.migrate` takes. See
        :meth:`wait_migration`."""
        return self._ask("POST", "/migrate", MigrationState, _wish(goals, {"by": whoami(), **how}))

    def explain_migration(self, *goals: Goal, **how: Any) -> MigrationExplained:
        """Explain a migration without making it."""
        return self._ask("POST", "/explain-migration", MigrationExplained, _wish(goals, how))

    def migrations(self) -> list[MigrationState]:
        """The migrations in progress."""
        return self._ask("GET", "/migrations", list[MigrationState])

    def migration(self, number: int, wait_s: float = 0.0) -> MigrationState:
        """A migration; waits up to ``wait_s`` seconds for its end."""
        return self._ask("GET", f"/migrations/{number}?wait_s={wait_s:.3f}", MigrationState)

    def cancel(self, number: int) -> MigrationState:
        """Make no more steps of a migration."""
        return self._ask("POST", f"/migrations/{number}", MigrationState, MigrationTurn("cancel"))

    def reverse(self, number: int) -> MigrationState:
        """Bring the bins of a migration back; returns the migration that does so."""
        return self._ask("POST", f"/migrations/{number}", MigrationState, MigrationTurn("reverse"))

    def assignment(self) -> list[StageShares]:
        """The owner of each bin, and the bins, rows, work and state of each partition."""
        return self._ask("GET", "/assignment", list[StageShares])

    def executors(self) -> list[ExecutorShare]:
        """The executors that Spark has, and the part of the job that each has."""
        return self._ask("GET", "/executors", list[ExecutorShare])

    def freeze(self, epochs: int) -> int:
        """Promise that the next epochs keep their assignments; returns the first that need not."""
        return self._ask("POST", "/freeze", Frozen, FreezeRequest(epochs)).free_from

    # ── control operations ────────────────────────────────────────────────────────────────────────────────────────

    def control(self, operation: ControlOperation, *, by: str | None = None, note: str | None = None) -> ControlState:
        """Run a control operation; returns it as it begins. See :meth:`wait_control`."""
        body = ControlRequest.of(operation, by or whoami(), note)
        return self._ask("POST", "/controls", ControlState, body)

    def controls(self) -> list[ControlRecord]:
        """The control operations of this start of the job, and all blocking ones, oldest first."""
        return self._ask("GET", "/controls", list[ControlRecord])

    def wait_control(self, number: int, timeout: float | None = None) -> ControlState:
        """Wait for the end of a control operation; it is not over if the time runs out."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            left = POLL_S if deadline is None else min(POLL_S, max(0.0, deadline - time.monotonic()))
            state = self._ask("GET", f"/controls/{number}?wait_s={left:.3f}", ControlState)
            if state.is_over or (deadline is not None and time.monotonic() >= deadline):
                return state

    # ── controllers ───────────────────────────────────────────────────────────────────────────────────────────────

    def attach(self, controller: Controller, *, name: str | None = None, advise: bool = False) -> ControllerState:
        """Let a controller look after the job. Its code travels along."""
        return self._ask("POST", "/controllers", ControllerState, AttachRequest.of(controller, name, advise))

    def detach(self, name: str) -> ControllerState:
        """Stop asking a controller."""
        return self._ask("DELETE", f"/controllers/{quote(name, safe='')}", ControllerState)

    def controllers(self) -> list[ControllerState]:
        """The controllers of the job."""
        return self._ask("GET", "/controllers", list[ControllerState])

    def proposals(self) -> list[ProposalRecord]:
        """Their proposals with outcomes, oldest first."""
        return self._ask("GET", "/proposals", list[ProposalRecord])

    def _ask(self, method: str, path: str, kind: type[T], body: Any = None, timeout: float = ANSWER_S) -> T:
        answer = self._send(method, path, b"" if body is None else msgspec.json.encode(body), timeout)
        try:
            return msgspec.json.decode(answer, type=kind)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise MidstreamError(
                f"{self.url} sent an answer to {method} {path} that cannot be understood ({error}); does the job use "
                f"another version of midstream?"
            ) from error

    def _send(self, method: str, path: str, body: bytes, timeout: float) -> bytes:
        if len(body) > LARGEST:
            raise FlowError(
                f"the change has {len(body):,} bytes; a job accepts at most {LARGEST:,}. Put large models or tables "
                f"into a file that the function reads in open()"
            )
        at = urlsplit(self.url)
        connection = http.client.HTTPConnection(at.hostname or "", at.port, timeout=timeout)
        headers = {"Authorization": f"Bearer {self._token}", "Content-Type": "application/json", "Connection": "close"}
        try:
            connection.request(method, path, body or None, headers)
            response = connection.getresponse()
            answer = response.read()
        except TimeoutError as error:
            raise MidstreamError(f"the job at {self.url} did not answer within {timeout:g} s") from error
        except (OSError, http.client.HTTPException) as error:
            raise MidstreamError(
                f"nobody answers at {self.url} ({type(error).__name__}): the job has ended. `midstream jobs` lists "
                f"the served jobs"
            ) from error
        finally:
            connection.close()
        if response.status != 200:
            raise _error_of(self.url, response.status, answer)
        return answer


def _wish(goals: tuple[Goal, ...], how: dict[str, Any]) -> MigrationWish:
    at = how.pop("at", None)
    moment = {} if at is None else {"at_time": at} if isinstance(at, datetime) else {"at_epoch": at}
    return MigrationWish(tuple(message for goal in goals for message in goal_messages(goal)), **how, **moment)


def _packed(edits: tuple[Edit, ...]) -> tuple[EditMessage, ...]:
    return tuple(message_of(edit) for edit in check_edits(edits))


def _error_of(url: str, status: int, answer: bytes) -> MidstreamError:
    """The error for a job's refusal."""
    if status == 401:
        return MidstreamError(
            f"{url} does not accept this token: another job, or another start of it, listens there now. `midstream "
            f"jobs` lists the served jobs"
        )
    try:
        told = msgspec.json.decode(answer, type=ErrorReply)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return MidstreamError(f"{url} answers with status {status}: {answer[:200]!r}")
    if status == 422 and told.error in errors.__all__:
        kind: type[MidstreamError] = getattr(errors, told.error)
        return kind(told.message)
    return MidstreamError(f"{url} answers with status {status}, {told.error}: {told.message}")
