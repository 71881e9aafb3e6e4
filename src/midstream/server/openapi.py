"""The OpenAPI 3.1 description of the interface. Schemas of messages are derived from their types; the rest is text."""

from __future__ import annotations

from functools import cache
from typing import Any

import msgspec

from midstream.checkpoint.change_records import ChangeRecord
from midstream.server.messages import (
    ChangeRequest,
    Deployed,
    DeployRequest,
    ErrorReply,
    Explained,
    JobState,
    RevertRequest,
    Welcome,
)
from midstream.version import __version__

__all__ = ["description"]

_MESSAGES = (
    ChangeRecord,
    ChangeRequest,
    DeployRequest,
    Deployed,
    Explained,
    ErrorReply,
    JobState,
    RevertRequest,
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
            "/history": {"get": _history()},
            "/history/{number}": {"get": _change()},
            "/revert": {"post": _post("Go back to an earlier revision, as a change", RevertRequest, ChangeRecord)},
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


def _graph() -> dict[str, Any]:
    styles = {"type": "string", "enum": ["text", "mermaid", "svg"], "default": "text"}
    content = {"text/plain": {"schema": {"type": "string"}}, "image/svg+xml": {"schema": {"type": "string"}}}
    operation = _operation("The flow that runs, as a drawing", content, _422="There is no such format.")
    return {**operation, "parameters": [{"name": "format", "in": "query", "schema": styles}]}


def _history() -> dict[str, Any]:
    content = {"application/json": {"schema": {"type": "array", "items": _ref(ChangeRecord)}}}
    return _operation("All changes, oldest first", content, _422="The history cannot be read.")


def _change() -> dict[str, Any]:
    wait = {"type": "number", "minimum": 0, "maximum": 30, "default": 0}
    operation = _operation(
        "One change; waits up to wait_s seconds for the outcome of a change that was requested here",
        _body(ChangeRecord),
        _400="wait_s is not a valid number.",
        _404="There is no such change.",
    )
    parameters = [
        {"name": "number", "in": "path", "required": True, "schema": {"type": "integer"}},
        {"name": "wait_s", "in": "query", "schema": wait},
    ]
    return {**operation, "parameters": parameters}
