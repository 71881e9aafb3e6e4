"""The OpenAPI 3.1 description of the interface. Schemas of messages are derived from their types; the rest is text."""

from __future__ import annotations

from functools import cache
from typing import Any

import msgspec

from midstream.checkpoint.change_records import ChangeRecord
from midstream.checkpoint.control_log import ControlRecord
from midstream.control.placement import ExecutorShare
from midstream.controllers.proposal_records import ControllerState, ProposalRecord
from midstream.observation import Observation
from midstream.runtime.migration_desk import StageShares
from midstream.server.control_messages import ControlRequest, ControlState
from midstream.server.controller_messages import AttachRequest
from midstream.server.messages import (
    ChangeRequest,
    Deployed,
    DeployRequest,
    ErrorReply,
    Explained,
    JobState,
    RevertRequest,
    SavepointRequest,
    SavepointState,
    Welcome,
)
from midstream.server.migration_messages import (
    FreezeRequest,
    Frozen,
    MigrationExplained,
    MigrationState,
    MigrationTurn,
    MigrationWish,
)
from midstream.version import __version__

__all__ = ["description"]

_MESSAGES = (
    AttachRequest,
    ChangeRecord,
    ChangeRequest,
    ControlRecord,
    ControlRequest,
    ControlState,
    ControllerState,
    DeployRequest,
    Deployed,
    ErrorReply,
    ExecutorShare,
    Explained,
    FreezeRequest,
    Frozen,
    JobState,
    MigrationExplained,
    MigrationState,
    MigrationTurn,
    MigrationWish,
    Observation,
    ProposalRecord,
    RevertRequest,
    SavepointRequest,
    SavepointState,
    StageShares,
    Welcome,
)
_REF = "#/components/schemas/{name}"

_NO_TOKEN = {"description": "The token is missing or wrong. The body is empty, whatever the path."}
_EVERYWHERE = {
    "401": _NO_TOKEN,
    "421": {"description": "The request was addressed to another host."},
    "500": {"description": "A bug of midstream; the log of the job's process has the traceback."},
}


@cache
def description() -> dict[str, Any]:
    """The whole description, as served at ``GET /openapi.json``."""
    _, components = msgspec.json.schema_components(_MESSAGES, ref_template=_REF)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "midstream",
            "version": __version__,
            "summary": "Change a running Spark stream without stopping it.",
            "description": "One job, on the loopback address. Every request needs the token of the job's entry in the "
            "user's registry. Functions are pickled by value with cloudpickle, tables are Arrow IPC streams, both in "
            "base64.",
        },
        "security": [{"token": []}],
        "components": {"schemas": components, "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}}},
        "paths": {
            "/": {"get": _get("Which job this is", Welcome)},
            "/openapi.json": {"get": _operation("This description", {"application/json": {"schema": {}}})},
            "/status": {"get": _get("The state of the job, its recent epochs, and the change on trial", JobState)},
            "/observation": {"get": _observation()},
            "/metrics": {"get": _metrics()},
            "/graph": {"get": _graph()},
            "/explain": {"post": _post("What a change would do", ChangeRequest, Explained)},
            "/update": {
                "post": _post(
                    "Change the job. Answers when running tasks have been notified; the outcome is still pending",
                    ChangeRequest,
                    ChangeRecord,
                )
            },
            "/deploy": {
                "post": _post("Run what a script says, as one change; or only plan that", DeployRequest, Deployed)
            },
            "/history": {"get": _list("All changes, oldest first", ChangeRecord, _422="The history cannot be read.")},
            "/history/{number}": {
                "get": _numbered(
                    "One change; waits up to wait_s seconds for the outcome of a change that was requested here",
                    ChangeRecord,
                )
            },
            "/revert": {"post": _post("Go back to an earlier revision, as a change", RevertRequest, ChangeRecord)},
            "/migrate": {"post": _post("Give bins other owners, step by step", MigrationWish, MigrationState)},
            "/explain-migration": {"post": _post("What a migration would do", MigrationWish, MigrationExplained)},
            "/migrations": {"get": _list("The migrations in progress", MigrationState)},
            "/migrations/{number}": {
                "get": _numbered(
                    "One migration of this start of the job; waits up to wait_s seconds for its end", MigrationState
                ),
                "post": {
                    **_post("Cancel or reverse a migration", MigrationTurn, MigrationState),
                    "parameters": [_NUMBER],
                },
            },
            "/assignment": {"get": _list("Which partition owns which bin, and what each partition has", StageShares)},
            "/executors": {"get": _list("The executors, and what each has of the job", ExecutorShare)},
            "/freeze": {"post": _post("Promise that the next epochs keep their assignments", FreezeRequest, Frozen)},
            "/controls": {
                "get": _list("The control operations of this start of the job, and all blocking ones", ControlRecord),
                "post": _post("Run a control operation, pickled by value", ControlRequest, ControlState),
            },
            "/controls/{number}": {
                "get": _numbered(
                    "One control operation of this start of the job; waits up to wait_s seconds for its end",
                    ControlState,
                )
            },
            "/controllers": {
                "get": _list("The controllers of the job, in the order in which they are asked", ControllerState),
                "post": _post("Attach a controller, pickled by value", AttachRequest, ControllerState),
            },
            "/controllers/{name}": {
                "delete": _delete("Detach a controller", ControllerState, "No controller of this name is attached.")
            },
            "/proposals": {"get": _list("The proposals of controllers since this start of the job", ProposalRecord)},
            "/savepoints": {
                "get": _list("All savepoints, oldest epoch first", SavepointState, _422="They cannot be read."),
                "post": _post("Name the last committed epoch, and keep it", SavepointRequest, SavepointState),
            },
            "/savepoints/{name}": {
                "delete": _delete("Delete a savepoint", SavepointState, "There is no such savepoint.")
            },
        },
    }


def _ref(message: type) -> dict[str, str]:
    return {"$ref": _REF.format(name=message.__name__)}


def _body(message: type) -> dict[str, Any]:
    return {"application/json": {"schema": _ref(message)}}


def _operation(summary: str, content: dict[str, Any], **failures: str) -> dict[str, Any]:
    told = {
        code.removeprefix("_"): {"description": text, "content": _body(ErrorReply)} for code, text in failures.items()
    }
    return {"summary": summary, "responses": {"200": {"description": "OK", "content": content}, **told, **_EVERYWHERE}}


def _get(summary: str, answer: type) -> dict[str, Any]:
    return _operation(summary, _body(answer))


def _post(summary: str, body: type, answer: type) -> dict[str, Any]:
    operation = _operation(
        summary,
        _body(answer),
        _400="The body is not a valid message.",
        _413="The body is too large.",
        _422="The job refuses: `error` is the name of a class of midstream.errors.",
    )
    return {**operation, "requestBody": {"required": True, "content": _body(body)}}


def _observation() -> dict[str, Any]:
    content = {"application/json": {"schema": {"anyOf": [_ref(Observation), {"type": "null"}]}}}
    return _operation("What was observed of the last committed epoch; null before the first", content)


def _metrics() -> dict[str, Any]:
    content = {kind: {"schema": {"type": "string"}} for kind in ("text/plain", "application/openmetrics-text")}
    return _operation("The same as metrics for Prometheus", content)


def _graph() -> dict[str, Any]:
    styles = {"type": "string", "enum": ["text", "mermaid", "svg"], "default": "text"}
    content = {"text/plain": {"schema": {"type": "string"}}, "image/svg+xml": {"schema": {"type": "string"}}}
    operation = _operation("The flow that runs, as a drawing", content, _422="There is no such format.")
    return {**operation, "parameters": [{"name": "format", "in": "query", "schema": styles}]}


def _list(summary: str, item: type, **failures: str) -> dict[str, Any]:
    content = {"application/json": {"schema": {"type": "array", "items": _ref(item)}}}
    return _operation(summary, content, **failures)


def _delete(summary: str, answer: type, missing: str) -> dict[str, Any]:
    operation = _operation(summary, _body(answer), _422=missing)
    name = {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}
    return {**operation, "parameters": [name]}


_NUMBER = {"name": "number", "in": "path", "required": True, "schema": {"type": "integer"}}


def _numbered(summary: str, answer: type) -> dict[str, Any]:
    wait = {"type": "number", "minimum": 0, "maximum": 30, "default": 0}
    operation = _operation(
        summary, _body(answer), _400="wait_s is not a valid number.", _404="There is none with this number."
    )
    return {**operation, "parameters": [_NUMBER, {"name": "wait_s", "in": "query", "schema": wait}]}
