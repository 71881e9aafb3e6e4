"""The HTTP interface of one job: its requests, and how errors are reported.

Calls into the job may take time (storing functions, waiting for a lock), so they run in threads and never in the event
loop that answers other requests.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from midstream.change.change import Change
from midstream.checkpoint.change_records import ChangeRecord
from midstream.drawing.render import render
from midstream.errors import MidstreamError
from midstream.server.control_endpoints import ControlEndpoints
from midstream.server.control_messages import ControlRequest
from midstream.server.controller_endpoints import ControllerEndpoints
from midstream.server.controller_messages import AttachRequest
from midstream.server.exposition import OPENMETRICS, TEXT, exposition, format_wanted
from midstream.server.guard import Guard, failure
from midstream.server.messages import (
    EDIT_KINDS,
    ChangeRequest,
    Deployed,
    DeployRequest,
    Explained,
    JobState,
    RevertRequest,
    SavepointRequest,
    SavepointState,
    Welcome,
)
from midstream.server.migration_endpoints import MigrationEndpoints
from midstream.server.migration_messages import GOAL_KINDS, FreezeRequest, MigrationTurn, MigrationWish
from midstream.server.openapi import description
from midstream.version import __version__

if TYPE_CHECKING:
    from midstream.runtime.spark.job import Job

__all__ = ["BODY_LIMIT", "application"]

T = TypeVar("T")
Handler = Callable[[Request], Awaitable[Response]]

_log = logging.getLogger("midstream")

BODY_LIMIT = 256 * 1024 * 1024
"""Most bytes of a request; larger models or tables belong in a file that the function opens."""

RECENT = 10
KEPT_CHANGES = 100
LONGEST_WAIT_S = 30.0
MEDIA_TYPES = {"text": "text/plain; charset=utf-8", "mermaid": "text/plain; charset=utf-8", "svg": "image/svg+xml"}


def application(job: Job, token: str, *, body_limit: int = BODY_LIMIT) -> ASGIApp:
    """The interface of a job, protected by the token."""
    return Guard(routes_of(job, body_limit), token)


def routes_of(job: Job, body_limit: int = BODY_LIMIT) -> Starlette:
    """The interface without the token check."""
    endpoints = _Endpoints(job, body_limit)
    routes = [
        _route("/", "GET", endpoints.welcome),
        _route("/openapi.json", "GET", endpoints.openapi),
        _route("/status", "GET", endpoints.status),
        _route("/observation", "GET", endpoints.observation),
        _route("/metrics", "GET", endpoints.metrics),
        _route("/graph", "GET", endpoints.graph),
        _route("/explain", "POST", endpoints.explain),
        _route("/update", "POST", endpoints.update),
        _route("/deploy", "POST", endpoints.deploy),
        _route("/history", "GET", endpoints.history),
        _route("/history/{number}", "GET", endpoints.change),
        _route("/revert", "POST", endpoints.revert),
        _route("/migrate", "POST", endpoints.migrate),
        _route("/explain-migration", "POST", endpoints.explain_migration),
        _route("/migrations", "GET", endpoints.migrations),
        _route("/migrations/{number}", "GET", endpoints.migration),
        _route("/migrations/{number}", "POST", endpoints.turn),
        _route("/assignment", "GET", endpoints.assignment),
        _route("/executors", "GET", endpoints.executors),
        _route("/freeze", "POST", endpoints.freeze),
        _route("/controls", "GET", endpoints.controls),
        _route("/controls", "POST", endpoints.control),
        _route("/controls/{number}", "GET", endpoints.operation),
        _route("/controllers", "GET", endpoints.controllers),
        _route("/controllers", "POST", endpoints.attach),
        _route("/controllers/{name}", "DELETE", endpoints.detach),
        _route("/proposals", "GET", endpoints.proposals),
        _route("/savepoints", "GET", endpoints.savepoints),
        _route("/savepoints", "POST", endpoints.savepoint),
        _route("/savepoints/{name}", "DELETE", endpoints.delete_savepoint),
    ]
    handlers: Mapping[Any, Any] = {HTTPException: _error_reply}
    app = Starlette(routes=routes, exception_handlers=handlers)
    app.router.redirect_slashes = False
    return app


class _Endpoints:
    def __init__(self, job: Job, body_limit: int) -> None:
        self._job = job
        self._body_limit = body_limit
        self._changes: OrderedDict[int, Change] = OrderedDict()
        self._migrating = MigrationEndpoints(job)
        self._controlling = ControlEndpoints(job)
        self._steering = ControllerEndpoints(job)

    async def welcome(self, request: Request) -> Response:
        return _json(Welcome(__version__, self._job.name, self._job.id))

    async def openapi(self, request: Request) -> Response:
        return _json(description())

    async def status(self, request: Request) -> Response:
        return _json(await run_in_threadpool(state_of, self._job))

    async def observation(self, request: Request) -> Response:
        return _json(await run_in_threadpool(lambda: self._job.observation))

    async def metrics(self, request: Request) -> Response:
        is_open = format_wanted(request.headers.get("accept", ""))
        seen = await run_in_threadpool(lambda: self._job.observation)
        text = exposition(self._job.name, self._job.id, seen, openmetrics=is_open)
        # As it is: the charset is part of both formats' types, and Starlette would add another one.
        return Response(text, headers={"content-type": OPENMETRICS if is_open else TEXT})

    async def graph(self, request: Request) -> Response:
        style: Any = request.query_params.get("format", "text")
        drawn = await run_in_threadpool(render, self._job.graph, style)
        return Response(drawn, media_type=MEDIA_TYPES[style])

    async def explain(self, request: Request) -> Response:
        return _json(await run_in_threadpool(self._explain, await self._read(request, ChangeRequest)))

    async def update(self, request: Request) -> Response:
        return _json(await run_in_threadpool(self._update, await self._read(request, ChangeRequest)))

    async def deploy(self, request: Request) -> Response:
        return _json(await run_in_threadpool(self._deploy, await self._read(request, DeployRequest)))

    async def revert(self, request: Request) -> Response:
        return _json(await run_in_threadpool(self._revert, await self._read(request, RevertRequest)))

    async def history(self, request: Request) -> Response:
        return _json(await run_in_threadpool(self._job.history))

    async def change(self, request: Request) -> Response:
        number, wait_s = _number(request.path_params["number"]), _seconds(request.query_params.get("wait_s", "0"))
        return _json(await run_in_threadpool(self._change, number, wait_s))

    async def migrate(self, request: Request) -> Response:
        wish = await self._read(request, MigrationWish)
        return _json(await run_in_threadpool(self._migrating.migrate, wish))

    async def explain_migration(self, request: Request) -> Response:
        wish = await self._read(request, MigrationWish)
        return _json(await run_in_threadpool(self._migrating.explain, wish))

    async def migrations(self, request: Request) -> Response:
        return _json(await run_in_threadpool(self._migrating.migrations))

    async def migration(self, request: Request) -> Response:
        number, wait_s = _number(request.path_params["number"]), _seconds(request.query_params.get("wait_s", "0"))
        return _json(await run_in_threadpool(self._migrating.migration, number, wait_s))

    async def turn(self, request: Request) -> Response:
        number, turn = _number(request.path_params["number"]), await self._read(request, MigrationTurn)
        return _json(await run_in_threadpool(self._migrating.turn, number, turn))

    async def assignment(self, request: Request) -> Response:
        return _json(await run_in_threadpool(self._migrating.assignment))

    async def executors(self, request: Request) -> Response:
        return _json(await run_in_threadpool(self._migrating.executors))

    async def freeze(self, request: Request) -> Response:
        wanted = await self._read(request, FreezeRequest)
        return _json(await run_in_threadpool(self._migrating.freeze, wanted))

    async def controls(self, request: Request) -> Response:
        return _json(await run_in_threadpool(self._controlling.controls))

    async def control(self, request: Request) -> Response:
        wanted = await self._read(request, ControlRequest)
        return _json(await run_in_threadpool(self._controlling.control, wanted))

    async def operation(self, request: Request) -> Response:
        number, wait_s = _number(request.path_params["number"]), _seconds(request.query_params.get("wait_s", "0"))
        return _json(await run_in_threadpool(self._controlling.operation, number, wait_s))

    async def controllers(self, request: Request) -> Response:
        return _json(await run_in_threadpool(self._steering.controllers))

    async def attach(self, request: Request) -> Response:
        wanted = await self._read(request, AttachRequest)
        return _json(await run_in_threadpool(self._steering.attach, wanted))

    async def detach(self, request: Request) -> Response:
        return _json(await run_in_threadpool(self._steering.detach, request.path_params["name"]))

    async def proposals(self, request: Request) -> Response:
        return _json(await run_in_threadpool(self._steering.proposals))

    async def savepoints(self, request: Request) -> Response:
        found = await run_in_threadpool(self._job.savepoints)
        return _json([SavepointState.of(each) for each in found])

    async def savepoint(self, request: Request) -> Response:
        wanted = await self._read(request, SavepointRequest)
        taken = await run_in_threadpool(partial(self._job.savepoint, wanted.name, note=wanted.note, by=wanted.by))
        return _json(SavepointState.of(taken))

    async def delete_savepoint(self, request: Request) -> Response:
        deleted = await run_in_threadpool(self._job.delete_savepoint, request.path_params["name"])
        return _json(SavepointState.of(deleted))

    def _explain(self, wanted: ChangeRequest) -> Explained:
        explanation = self._job.explain(*wanted.unpacked(), scheduler=wanted.scheduler)
        return Explained(str(explanation), explanation.to_svg(), *explanation.expected_wait_ms)

    def _update(self, wanted: ChangeRequest) -> ChangeRecord:
        change = self._job.update(
            *wanted.unpacked(),
            scheduler=wanted.scheduler,
            time_limit=wanted.time_limit,
            by=wanted.by,
            note=wanted.note,
        )
        return self._remember(change)

    def _deploy(self, wanted: DeployRequest) -> Deployed:
        graph, migrate, state = wanted.unpacked(), wanted.migrations(), wanted.initial_states()
        if wanted.plan_only:
            explanation = self._job.explain_deployment(
                graph, migrate=migrate, flush=wanted.flush, state=state, scheduler=wanted.scheduler
            )
            return Deployed() if explanation is None else Deployed(None, str(explanation), explanation.to_svg())
        change = self._job.deploy(
            graph,
            migrate=migrate,
            flush=wanted.flush,
            state=state,
            scheduler=wanted.scheduler,
            time_limit=wanted.time_limit,
            by=wanted.by,
            note=wanted.note,
        )
        return Deployed() if change is None else Deployed(self._remember(change), change.record.plan)

    def _revert(self, wanted: RevertRequest) -> ChangeRecord:
        change = self._job.revert(wanted.revision, migrate=wanted.unpacked(), scheduler=wanted.scheduler, by=wanted.by)
        return self._remember(change)

    def _remember(self, change: Change) -> ChangeRecord:
        """Keep the handle, so that clients can wait for the outcome."""
        self._changes[change.record.number] = change
        if len(self._changes) > KEPT_CHANGES:
            self._changes.popitem(last=False)
        return change.record

    def _change(self, number: int, wait_s: float) -> ChangeRecord:
        if (change := self._changes.get(number)) is not None:
            change.wait(wait_s)
            return change.record
        records = self._job.history()
        for record in records:
            if record.number == number:
                return record
        raise HTTPException(404, f"there is no change {number}; the job has {len(records)} changes")

    async def _read(self, request: Request, kind: type[T]) -> T:
        too_large = HTTPException(413, f"at most {self._body_limit:,} bytes are allowed", {"connection": "close"})
        announced = request.headers.get("content-length", "0")
        if not announced.isdigit() or int(announced) > self._body_limit:
            raise too_large
        body = bytearray()
        async for chunk in request.stream():
            body += chunk
            if len(body) > self._body_limit:
                raise too_large
        try:
            return await run_in_threadpool(partial(msgspec.json.decode, bytes(body), type=kind))
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            kinds, what = (GOAL_KINDS, "Goals") if kind is MigrationWish else (EDIT_KINDS, "Edits")
            allowed = f". {what} may be of the kinds {', '.join(kinds)}" if ".kind`" in str(error) else ""
            raise HTTPException(400, f"the body is not a {kind.__name__} in JSON: {error}{allowed}") from error


def state_of(job: Job) -> JobState:
    """The state of a job."""
    metrics, change, exception = job.metrics, job.on_trial, job.exception
    return JobState(
        name=job.name,
        id=job.id,
        status=str(job.status),
        revision=job.revision,
        epochs=metrics.epochs,
        rows_in=metrics.rows_in,
        rows_out=metrics.rows_out,
        busy_ms=metrics.busy_ms,
        progress=tuple(job.progress)[-RECENT:],
        on_trial=None if change is None else change.record,
        error=None if exception is None else str(exception),
        sweep=metrics.sweep,
        errors={stats.operator: stats.errors for stats in metrics.operators if stats.errors},
        knobs=job.knobs,
        rows_ahead={stats.operator: stats.rows_ahead for stats in metrics.operators if stats.rows_ahead},
    )


def _route(path: str, method: str, handler: Handler) -> Route:
    async def answer(request: Request) -> Response:
        try:
            return await handler(request)
        except MidstreamError as error:
            return failure(422, type(error).__name__, str(error))
        except HTTPException:
            raise
        except Exception as error:  # a bug of ours: the client is told so, and the log has the details
            _log.exception("%s %s failed in the server of a job", request.method, path)
            return failure(500, "InternalError", f"{type(error).__name__}; see the log of the job's process")

    return Route(path, answer, methods=[method], name=path)


def _json(value: Any) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")


def _number(text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise HTTPException(404, f"{text!r:.40} is not the number of a change")
    return int(text)


def _seconds(text: str) -> float:
    try:
        wait_s = float(text)
    except ValueError:
        wait_s = -1.0
    if not 0.0 <= wait_s <= LONGEST_WAIT_S:
        raise HTTPException(400, f"wait_s={text!r:.40} must be a number of seconds from 0 to {LONGEST_WAIT_S:g}")
    return wait_s


async def _error_reply(request: Request, error: HTTPException) -> Response:
    kinds = {404: "NotFound", 405: "MethodNotAllowed", 413: "TooLarge"}
    detail = f"{request.method} {request.url.path}: see /openapi.json" if error.status_code == 405 else error.detail
    return failure(error.status_code, kinds.get(error.status_code, "BadRequest"), detail, dict(error.headers or {}))
