"""A served job over real HTTP: access, requests, errors, and cleanup."""

from __future__ import annotations

import base64
import http.client
import importlib.util
import inspect
import json
import logging
import os
import re
import socket
import stat
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import urlsplit

import msgspec
import pyarrow as pa
import pytest

from midstream import Update, errors
from midstream.checkpoint.change_records import ChangeRecord, Outcome
from midstream.errors import ChangeFailed, FlowError, FunctionError, MidstreamError, SchemaError, SetupError
from midstream.flow.functions import pack
from midstream.server import app as app_module
from midstream.server import client as client_module
from midstream.server.app import routes_of
from midstream.server.client import JobClient
from midstream.server.messages import ChangeRequest, UpdateMessage, python_version
from midstream.server.openapi import description
from midstream.server.registry import ServedEntry, folders, register, served_jobs
from midstream.server.serve import JobServer
from midstream.server.start import port_wanted
from tests.served import RATES, StandInJob, served

if TYPE_CHECKING:
    from midstream.runtime.spark.job import Job

POST_PATHS = ("/explain", "/update", "/revert")
GET_PATHS = ("/", "/openapi.json", "/status", "/graph", "/history", "/history/1")
METHODS = ("GET", "POST", "PUT", "DELETE", "OPTIONS", "HEAD", "PATCH", "TRACE")


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("MIDSTREAM_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def job(tmp_path):
    return StandInJob(tmp_path)


@pytest.fixture
def server(job):
    with served(job, checkpoint="somewhere") as server:
        yield server


@pytest.fixture(scope="module")
def idle(tmp_path_factory):
    """One server for all tests that change nothing."""
    folder = tmp_path_factory.mktemp("idle")
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("MIDSTREAM_HOME", str(folder))
        server = JobServer(cast("Job", StandInJob(folder)))
    yield server
    server.close()


@pytest.fixture
def client(server):
    return JobClient(server.url, server.token)


Answer = tuple[int, dict[str, str], bytes]


def ask(server: JobServer, method: str, path: str, body: Any = None, headers: Any = None, **kwargs: Any) -> Answer:
    """A request as any program could send it; with the token unless ``headers`` override it."""
    at = urlsplit(server.url)
    connection = http.client.HTTPConnection(str(at.hostname), at.port, timeout=30)
    given = {"Authorization": f"Bearer {server.token}"} if headers is None else headers
    try:
        connection.request(method, path, body, given, **kwargs)
        response = connection.getresponse()
        return response.status, {k.lower(): v for k, v in response.getheaders()}, response.read()
    finally:
        connection.close()


def told(answer: Answer) -> tuple[int, str, str]:
    status, _, body = answer
    content = json.loads(body)
    assert set(content) == {"error", "message"}
    return status, content["error"], content["message"]


def triple(row: dict[str, Any]) -> dict[str, Any]:
    return {**row, "n": 3 * row["n"]}


def message(function: Any = triple, operator: str = "FM", **more: Any) -> dict[str, Any]:
    data = base64.b64encode(pack(function, operator).data).decode()
    return {"edits": [{"kind": "update", "operator": operator, "function": data}], "python": python_version(), **more}


# ── access ────────────────────────────────────────────────────────────────────────────────────────────────────────


def wrong_credentials(token: str) -> list[dict[str, str]]:
    return [
        {},
        {"Authorization": ""},
        {"Authorization": "Bearer"},
        {"Authorization": "Bearer "},
        {"Authorization": "Bearer " + token[:-1]},
        {"Authorization": "Bearer " + token + "x"},
        {"Authorization": "Bearer " + token.swapcase()},
        {"Authorization": token},
        {"Authorization": "Basic " + token},
        {"Authorization": "Basic " + base64.b64encode(f"user:{token}".encode()).decode()},
        {"Authorization": "Bearer \xff\xfe"},
        {"X-Token": token},
        {"Cookie": f"token={token}"},
    ]


def nothing_but_401(answer: Answer) -> bool:
    status, headers, body = answer
    return (status, body) == (401, b"") and set(headers) == {"content-length", "connection"}


def test_without_the_token_every_path_and_method_gets_401_and_nothing_else(idle):
    for path in (*GET_PATHS, *POST_PATHS, "/docs", "/nothing/../status", "//", "/status/", "/history/x", "/%00"):
        for method in METHODS:
            assert nothing_but_401(ask(idle, method, path, headers={})), (method, path)


def test_a_wrong_token_gets_the_same_answer_as_none(idle):
    for credentials in wrong_credentials(idle.token):
        for path in ("/status", "/nothing"):
            assert nothing_but_401(ask(idle, "GET", path, headers=credentials)), credentials
        assert nothing_but_401(ask(idle, "POST", "/update", b"{}", headers=credentials)), credentials
    assert nothing_but_401(ask(idle, "GET", f"/status?token={idle.token}&access_token={idle.token}", headers={}))


def test_two_tokens_are_refused(idle):
    at = urlsplit(idle.url)
    with socket.create_connection((at.hostname, at.port), timeout=30) as connection:
        bearer = f"Authorization: Bearer {idle.token}\r\n"
        connection.sendall(f"GET /status HTTP/1.1\r\nHost: localhost\r\n{bearer}{bearer}\r\n".encode())
        assert connection.makefile("rb").readline().startswith(b"HTTP/1.1 401 ")


class Tripwire:
    """Creates a folder when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def test_nothing_is_unpickled_before_the_token_is_checked(server, job, tmp_path):
    trap = tmp_path / "trap"
    body = json.dumps(message(Tripwire(trap)))
    for path in POST_PATHS:
        assert nothing_but_401(ask(server, "POST", path, body, headers={}))
    assert not trap.exists()
    assert job.history() == []
    assert ask(server, "POST", "/update", json.dumps(message(Tripwire(trap))))[0] == 422
    assert trap.exists(), "the trap works"


def test_the_token_is_long_and_new_at_every_start(job, server):
    with_another = JobServer(job)
    with_another.close()
    assert with_another.token != server.token
    assert len(base64.urlsafe_b64decode(server.token + "=")) == 32


def test_the_authorization_scheme_is_case_insensitive(idle):
    assert ask(idle, "GET", "/status", headers={"Authorization": f"bearer {idle.token}"})[0] == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "localhost@evil", "", "[::1]"]
)
def test_a_request_for_another_host_is_refused(idle, host):
    answer = ask(idle, "GET", "/status", headers={"Authorization": f"Bearer {idle.token}", "Host": host})
    assert told(answer)[:2] == (421, "MisdirectedRequest")
    assert nothing_but_401(ask(idle, "GET", "/status", headers={"Host": host})), "strangers do not even learn that"


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:99", "127.0.0.1", "127.0.0.1:8080"])
def test_a_request_for_this_machine_is_answered(idle, host):
    assert ask(idle, "GET", "/", headers={"Authorization": f"Bearer {idle.token}", "Host": host})[0] == 200


def test_no_answer_allows_other_origins(idle):
    origin = {"Authorization": f"Bearer {idle.token}", "Origin": "https://evil.example"}
    for method, path in (("GET", "/status"), ("OPTIONS", "/update"), ("GET", "/nothing")):
        _, headers, _ = ask(idle, method, path, headers=origin)
        assert not any(name.startswith("access-control") for name in headers)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "example.org", "192.168.0.1", ""])
def test_only_the_loopback_address_is_served(job, host):
    with pytest.raises(FlowError, match=r"served on 127\.0\.0\.1 only"):
        JobServer(job, host=host)
    assert served_jobs() == []


def test_the_token_is_in_no_log_and_no_representation(server, client, caplog):
    caplog.set_level(logging.DEBUG)
    client.status()
    ask(server, "POST", "/update", b"{")
    with pytest.raises(FlowError):
        client.update(Update("FN", triple))
    [entry] = served_jobs()
    texts = [caplog.text, repr(server), repr(client), repr(entry), str(entry), " ".join(sys.argv)]
    assert [text for text in texts if server.token in text] == []


# ── requests ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_status(client, job):
    job.commit()
    job.update(Update("FM", triple), note="better")
    found = client.status()
    assert (found.name, found.id, found.status, found.revision) == ("fraud", job.id, "running", 2)
    assert (found.epochs, found.rows_in, found.rows_out, found.busy_ms) == (1, 1000, 900, 500.0)
    assert [progress.epoch for progress in found.progress] == [0]
    assert found.on_trial is not None
    assert (found.on_trial.note, found.on_trial.outcome) == ("better", Outcome.PENDING)
    job.commit(1)
    assert client.status().on_trial is None


def test_status_of_a_failed_job_says_why(client, job):
    job.status, job.exception = "failed", errors.JobFailed("epoch 3 failed")
    assert (client.status().status, client.status().error) == ("failed", "epoch 3 failed")


def test_only_recent_epochs_are_sent(client, job):
    for epoch in range(30):
        job.commit(epoch)
    assert [progress.epoch for progress in client.status().progress] == list(range(20, 30))
    assert client.status().epochs == 30


def test_the_graph_is_drawn_in_each_style(server, client):
    assert client.graph().splitlines()[0] == "fraud"
    assert client.graph("mermaid").startswith("flowchart") or "-->" in client.graph("mermaid")
    status, headers, body = ask(server, "GET", "/graph?format=svg")
    assert (status, headers["content-type"]) == (200, "image/svg+xml")
    assert b"<svg" in body
    assert told(ask(server, "GET", "/graph?format=oil"))[:2] == (422, "FlowError")


def test_explain_changes_nothing(client, job):
    explained = client.explain(Update("FM", triple), scheduler="epoch")
    assert "FM" in explained.text
    assert "<svg" in explained.svg
    assert (explained.least_ms, explained.most_ms) == (0.0, 250.0)
    assert (job.revision, job.history()) == (1, [])


def test_a_function_is_sent_to_the_job(client, job):
    factor = 5

    def scaled(row):
        return {**row, "n": factor * row["n"]}

    record = client.update(Update("FM", scaled), note="why", by="ann@host", time_limit="5 seconds")
    assert (record.revision, record.operators, record.outcome) == (2, ("FM",), Outcome.PENDING)
    assert (record.by, record.note) == ("ann@host", "why")
    assert job.limits == [5.0]
    assert job.payload("FM")({"n": 2, "k": "a"}) == {"n": 10, "k": "a"}


class Model:
    def __init__(self, weight: int) -> None:
        self.weight = weight

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        return {**row, "n": self.weight * row["n"]}


def test_a_callable_object_and_a_table_are_sent_in_one_change(client, job):
    table = pa.table({"k": ["a", "b"], "rate": [2.0, 3.0]})
    record = client.update(Update("FM", Model(7)), Update("rates", table))
    assert record.operators == ("FM", "rates")
    assert job.payload("FM")({"n": 1, "k": "a"})["n"] == 7
    assert job.payload("rates").to_pydict() == table.to_pydict()


def test_a_pandas_table_is_accepted(client, job):
    client.update(Update("rates", RATES.to_pandas()))
    assert job.payload("rates").to_pydict() == RATES.to_pydict()


def test_a_client_identifies_itself(client):
    assert "@" in client.update(Update("FM", triple)).by


def test_wait_returns_the_outcome(client, job):
    number = client.update(Update("FM", triple)).number
    assert client.wait(number, timeout=0).outcome is Outcome.PENDING
    job.commit()
    found = client.wait(number)
    assert found.outcome is Outcome.APPLIED
    assert found.delay_ms is not None


def test_wait_wakes_when_the_outcome_is_known(client, job):
    number = client.update(Update("FM", triple)).number
    found: list[ChangeRecord] = []
    waiting = threading.Thread(target=lambda: found.append(client.wait(number)))
    waiting.start()
    job.fail("ValueError: the new model is broken")
    waiting.join(60)
    [record] = found
    assert record.outcome is Outcome.ROLLED_BACK
    assert (record.error or "").startswith("ValueError: the new model is broken\n\nThe job continues as revision 3")


def test_wait_ends_with_the_job(client, job):
    number = client.update(Update("FM", triple)).number
    job.changes.abandon("job 'fraud' has ended")
    found = client.wait(number)
    assert found.outcome is Outcome.PENDING
    assert (found.error or "").startswith("job 'fraud' has ended; the next start with the same checkpoint continues")


def test_an_older_change_is_found_in_the_history(client, job):
    job.update(Update("FM", triple))
    job.commit()
    assert client.wait(1).outcome is Outcome.APPLIED
    with pytest.raises(MidstreamError, match="404, NotFound: there is no change 7; the job has 1 changes"):
        client.wait(7)


def test_only_recent_changes_are_remembered(client, job, monkeypatch):
    monkeypatch.setattr(app_module, "KEPT_CHANGES", 2)
    for number in (1, 2, 3):
        assert client.update(Update("FM", triple)).number == number
        job.commit(number)
    assert [client.wait(number).outcome for number in (1, 2, 3)] == [Outcome.APPLIED] * 3


def test_history_and_revert(client, job):
    client.update(Update("FM", triple))
    job.commit()
    back = client.revert(1, by="ann@host")
    job.commit(1)
    assert client.wait(back.number).outcome is Outcome.APPLIED
    assert [(r.revision, r.operators, r.by == "ann@host") for r in client.history()] == [
        (2, ("FM",), False),
        (3, ("FM",), True),
    ]
    assert job.payload("FM")({"n": 4}) == {"n": 4}


# ── refusals ──────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("update", "kind", "says"),
    [
        (Update("FN", triple), FlowError, "has no operator 'FN'"),
        (Update("FM", lambda: None), FunctionError, "operator 'FM'"),
        (Update("FM", triple, returns="n string"), SchemaError, "other columns"),
        (Update("FM", triple, returns="nonsense"), SchemaError, "nonsense"),
        (Update("FM", 7), FunctionError, "expected a function"),
    ],
)
def test_a_refusal_is_raised_by_the_client_as_the_same_error(client, job, update, kind, says):
    with pytest.raises(kind, match=re.escape(says)) as caught:
        client.update(update)
    assert type(caught.value) is kind
    assert job.revision == 1


def test_reverting_to_an_unknown_revision_is_refused(client):
    with pytest.raises(FlowError, match="there is no revision 9"):
        client.revert(9)


def test_migrate_of_an_operator_that_is_not_reverted_is_refused(client, job):
    client.update(Update("FM", triple))
    job.commit()
    with pytest.raises(FlowError, match="migrate= names rates"):
        client.revert(1, migrate={"rates": lambda key, state: None})


def test_a_function_that_cannot_be_packed_is_refused_by_the_client(client, job):
    lock = threading.Lock()
    with pytest.raises(FunctionError, match="closure variable 'lock'"):
        client.update(Update("FM", lambda row: lock))
    assert job.history() == []


def test_a_function_that_cannot_be_loaded_is_refused(idle):
    content = message()
    content["edits"][0]["function"] = base64.b64encode(b"\x80\x05cno_such_module\nf\n.").decode()
    assert told(ask(idle, "POST", "/update", json.dumps(content)))[1:] == (
        "FunctionError",
        "operator 'FM': the job cannot load the object it was sent (ModuleNotFoundError: No module named "
        "'no_such_module'); packages that it uses must be installed where the job runs, too",
    )


def test_functions_of_another_python_are_refused_before_they_are_loaded(server, tmp_path):
    content = message(Tripwire(tmp_path / "trap"), python="3.8")
    status, kind, text = told(ask(server, "POST", "/update", json.dumps(content)))
    assert (status, kind) == (422, "FunctionError")
    assert "cannot run functions that Python '3.8' compiled" in text
    assert not (tmp_path / "trap").exists()


@pytest.mark.parametrize("more", [{}, {"function": "AAAA", "table": "AAAA"}])
def test_an_update_has_a_function_or_a_table(idle, more):
    body = {"edits": [{"kind": "update", "operator": "FM", **more}], "python": python_version()}
    assert "set either function or table" in told(ask(idle, "POST", "/update", json.dumps(body)))[2]


def test_an_edit_of_an_unknown_kind_is_refused(idle, job):
    body = {"edits": [{"kind": "swap", "operator": "FM", "between": ["a", "b"]}], "python": python_version()}
    status, _, text = told(ask(idle, "POST", "/update", json.dumps(body)))
    assert status == 400
    assert "'swap'" in text
    assert "Edits may be of the kinds 'update', 'move', 'rescale'" in text
    assert job.history() == []


def test_bytes_that_are_not_a_table_are_refused(idle):
    body = {"edits": [{"kind": "update", "operator": "rates", "table": "AAAA"}], "python": python_version()}
    assert told(ask(idle, "POST", "/update", json.dumps(body)))[:2] == (422, "FlowError")


def test_a_local_function_is_refused(client):
    with pytest.raises(FlowError, match="local= is only for the local runtime"):
        client.update(Update("FM", triple, local=lambda table: table))


@pytest.mark.parametrize("path", POST_PATHS)
@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'{"edits": 1}', b"\xff\xfe", b'{"revision": "x"}', b"null"])
def test_an_invalid_body_gets_400(idle, path, body):
    status, kind, text = told(ask(idle, "POST", path, body))
    assert (status, kind) == (400, "BadRequest")
    assert "in JSON" in text


def test_a_misspelt_field_is_not_ignored(server, job):
    assert told(ask(server, "POST", "/update", json.dumps(message(time_limt="5 s"))))[0] == 400
    assert job.history() == []


@pytest.mark.parametrize(
    "path", ["/nothing", "/status/", "/history/x", "/history/-1", "/history/1/2", "/history/%C2%B2"]
)
def test_an_unknown_path_gets_404(idle, path):
    assert told(ask(idle, "GET", path))[:2] == (404, "NotFound")


def test_a_wrong_method_gets_405(idle):
    for path in POST_PATHS:
        assert told(ask(idle, "GET", path))[:2] == (405, "MethodNotAllowed")
    for path in GET_PATHS:
        status, headers, _ = ask(idle, "POST", path)
        assert (status, headers["allow"]) == (405, "GET, HEAD") or "GET" in headers["allow"]


@pytest.mark.parametrize("wait", ["x", "-1", "31", "nan", "inf", ""])
def test_an_invalid_wait_gets_400(idle, wait):
    assert told(ask(idle, "GET", f"/history/1?wait_s={wait}"))[:2] == (400, "BadRequest")


def test_a_body_that_is_too_large_gets_413(job, monkeypatch):
    monkeypatch.setattr(
        "midstream.server.serve.application", lambda *args: app_module.application(*args, body_limit=99)
    )
    server = JobServer(job)
    try:
        announced = ask(server, "POST", "/update", b"x" * 100)
        assert told(announced) == (413, "TooLarge", "at most 99 bytes are allowed")
        in_chunks = ask(server, "POST", "/update", iter([b"x" * 60, b"x" * 60]), encode_chunked=True)
        assert told(in_chunks)[0] == 413
        assert told(ask(server, "POST", "/update", b"x" * 99))[0] == 400, "exactly the limit is allowed"
    finally:
        server.close()


def test_the_client_does_not_send_too_large_a_body(client, monkeypatch):
    monkeypatch.setattr(client_module, "LARGEST", 10)
    with pytest.raises(FlowError, match="a job accepts at most 10"):
        client.update(Update("FM", triple))


def test_client_and_server_have_the_same_size_limit():
    assert client_module.LARGEST == app_module.BODY_LIMIT == 256 * 2**20


def test_an_unexpected_error_does_not_reveal_details(server, client, job, monkeypatch, caplog):
    def broken():
        raise ZeroDivisionError("the secret is 42")

    monkeypatch.setattr(job, "history", broken)
    status, kind, text = told(ask(server, "GET", "/history"))
    assert (status, kind) == (500, "InternalError")
    assert "42" not in text
    assert "the secret is 42" in caplog.text, "but the log of the job has them"
    assert client.status().name == "fraud", "and the server keeps running"


def test_an_outdated_token_is_reported(idle):
    with pytest.raises(MidstreamError, match="does not accept this token"):
        JobClient(idle.url, "old").status()


def test_a_job_that_has_ended_is_reported(server, client):
    server.close()
    with pytest.raises(MidstreamError, match=r"nobody answers at http://127.0.0.1:\d+ \(ConnectionRefusedError\)"):
        client.status()


def test_a_job_that_does_not_answer_in_time_is_reported():
    with socket.create_server(("127.0.0.1", 0)) as mute:
        client = JobClient(f"http://127.0.0.1:{mute.getsockname()[1]}", "token")
        with pytest.raises(MidstreamError, match=r"did not answer within 0.05 s"):
            client.status(timeout=0.05)


def test_an_answer_of_another_version_is_reported(client, monkeypatch):
    monkeypatch.setattr(client, "_send", lambda *args: b'{"name": 7}')
    with pytest.raises(MidstreamError, match="another version of midstream"):
        client.status()


def test_unknown_error_classes_become_midstream_error():
    found = client_module._error_of("http://here", 422, b'{"error": "SystemExit", "message": "boo"}')
    assert type(found) is MidstreamError
    assert (
        type(client_module._error_of("http://here", 422, b'{"error": "ChangeFailed", "message": "m"}')) is ChangeFailed
    )
    assert "status 502: b'<html>'" in str(client_module._error_of("http://here", 502, b"<html>"))


# ── the OpenAPI description ───────────────────────────────────────────────────────────────────────────────────────


def routes() -> set[tuple[str, str]]:
    methods = {"GET", "POST", "PUT", "PATCH", "DELETE"}
    served: Any = routes_of(None)  # type: ignore[arg-type]  # routes do not depend on the job
    return {(route.path, method.lower()) for route in served.routes for method in route.methods & methods}


def test_the_openapi_description_has_exactly_the_routes():
    described = {(path, method) for path, methods in description()["paths"].items() for method in methods}
    assert described == routes()


def test_the_openapi_description_defines_every_message(server):
    status, headers, body = ask(server, "GET", "/openapi.json")
    assert (status, headers["content-type"]) == (200, "application/json")
    content = json.loads(body)
    assert content == json.loads(msgspec.json.encode(description()))
    assert content["openapi"].startswith("3.1")
    assert content["security"] == [{"token": []}]
    referred = set(re.findall(r'"#/components/schemas/(\w+)"', body.decode()))
    assert {"JobState", "ChangeRequest", "ChangeRecord", "UpdateMessage", "RevertRequest"} <= referred
    assert referred <= set(content["components"]["schemas"])


def test_the_openapi_description_has_the_path_parameters():
    for path, methods in description()["paths"].items():
        wanted = set(re.findall(r"{(\w+)}", path))
        for operation in methods.values():
            assert {p["name"] for p in operation.get("parameters", []) if p["in"] == "path"} == wanted
            assert {"200", "401"} <= set(operation["responses"])


def test_answers_match_the_openapi_description(server, job):
    job.update(Update("FM", triple))
    schemas = description()["components"]["schemas"]
    for path, name in (("/", "Welcome"), ("/status", "JobState"), ("/history/1", "ChangeRecord")):
        reference = description()["paths"][path.replace("/1", "/{number}")]["get"]["responses"]["200"]["content"]
        assert reference["application/json"]["schema"]["$ref"].endswith(f"/{name}")
        assert set(json.loads(ask(server, "GET", path)[2])) == set(schemas[name]["properties"])


def test_the_root_path_links_to_the_openapi_description(idle):
    content = json.loads(ask(idle, "GET", "/")[2])
    assert (content["name"], content["description"]) == ("fraud", "/openapi.json")


def test_a_body_that_follows_the_description_is_accepted():
    sent = ChangeRequest((UpdateMessage.of(Update("FM", triple)),), python_version(), note="n")
    assert msgspec.json.decode(msgspec.json.encode(sent), type=ChangeRequest) == sent
    assert schema_of("ChangeRequest")["required"] == ["edits", "python"]


def schema_of(name: str) -> Any:
    return description()["components"]["schemas"][name]


# ── start and end ─────────────────────────────────────────────────────────────────────────────────────────────────


def server_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("midstream-server")}


def test_a_server_leaves_nothing_behind(job, home):
    before = server_threads()
    server = JobServer(job)
    JobClient(server.url, server.token).status()
    assert len(server_threads() - before) == 1
    assert len(list((home / "jobs").iterdir())) == 1
    server.close()
    server.close()
    assert server_threads() <= before
    assert list((home / "jobs").iterdir()) == []


def test_a_server_that_is_closed_at_once_leaves_nothing_behind(job, home):
    before = server_threads()
    server = JobServer(job)
    server.close()
    assert server_threads() <= before
    assert list((home / "jobs").iterdir()) == []
    at = urlsplit(server.url)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((at.hostname, at.port))


def test_a_request_in_progress_is_answered_before_the_server_ends(server, client, job):
    number = client.update(Update("FM", triple)).number
    found: list[ChangeRecord] = []
    waiting = threading.Thread(target=lambda: found.append(client.wait(number)))
    waiting.start()
    job.changes.abandon("job 'fraud' has ended")
    waiting.join(60)
    server.close()
    [record] = found
    assert (record.error or "").startswith("job 'fraud' has ended; the next start")


def test_a_given_port_is_used_and_an_occupied_one_is_refused(job, server):
    port = urlsplit(server.url).port
    assert port is not None
    with pytest.raises(SetupError, match=f"cannot be served on port {port}.*use another port"):
        JobServer(job, port=port)
    server.close()
    again = JobServer(job, host="localhost", port=port)
    again.close()
    assert again.url == f"http://127.0.0.1:{port}"


def test_a_server_listens_on_the_loopback_address_only(idle):
    assert idle._listener.getsockname()[0] == "127.0.0.1"


def test_the_serve_option_is_checked_before_anything_starts(monkeypatch):
    assert [port_wanted(value) for value in (False, True, 1, 65535)] == [None, 0, 1, 65535]
    for nonsense in (0, -1, 65536, "8080", 1.5, None):
        with pytest.raises(FlowError, match=r"serve=.*: use True"):
            port_wanted(nonsense)  # type: ignore[arg-type]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SetupError, match=r"needs starlette and uvicorn.*pip install 'midstream\[server\]'"):
        port_wanted(True)
    assert port_wanted(False) is None


@pytest.mark.long
def test_the_commands_need_neither_starlette_nor_uvicorn():
    code = (
        "import sys; sys.modules['starlette'] = sys.modules['uvicorn'] = None\n"
        "import midstream.cli.app, midstream.server.client, midstream.server.registry, midstream.runtime.spark.start"
    )
    path = os.pathsep.join(sys.path)
    done = subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": path}, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()


def test_the_stand_in_job_has_the_interface_of_a_job(tmp_path):
    used = set(re.findall(r"job\.([a-z_]+)", inspect.getsource(app_module)))
    assert used == {name for name in used if hasattr(StandInJob(tmp_path), name)}


# ── the registry ──────────────────────────────────────────────────────────────────────────────────────────────────


def entry(**more: Any) -> ServedEntry:
    fields: dict[str, Any] = {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "url": "http://127.0.0.1:1",
        "token": "t",
        "job": "abc",
        "name": "fraud",
        "checkpoint": "c",
        "started_at": 1.0,
    }
    return ServedEntry(**{**fields, **more})


def dead_pid() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_an_entry_has_the_address_of_a_job(server, job):
    [found] = served_jobs()
    assert (found.pid, found.url, found.token) == (os.getpid(), server.url, server.token)
    assert (found.job, found.name, found.checkpoint) == (job.id, "fraud", "somewhere")
    assert found.started_at > 0


def test_only_its_user_can_read_an_entry_whatever_the_umask(home):
    before = os.umask(0)
    try:
        path = register(entry())
    finally:
        os.umask(before)
    assert (mode(path), mode(path.parent)) == (0o600, 0o700)


def test_a_folder_that_others_can_read_is_made_private(home):
    (home / "jobs").mkdir(parents=True, mode=0o755)
    (home / "jobs").chmod(0o755)
    register(entry())
    assert mode(home / "jobs") == 0o700


def test_a_folder_of_another_user_is_not_used(home, monkeypatch):
    register(entry())
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    assert served_jobs() == [], "entries of others could direct us to their servers"
    with pytest.raises(SetupError, match=r"belongs to another user.*MIDSTREAM_HOME"):
        register(entry())


def test_a_server_that_cannot_be_registered_is_not_started(job, home):
    home.write_text("a file")
    before = server_threads()
    with pytest.raises(SetupError, match="cannot be registered"):
        JobServer(job)
    assert server_threads() <= before


def test_entries_of_dead_processes_are_removed(home):
    alive, dead = register(entry(job="alive")), register(entry(job="dead", pid=dead_pid()))
    assert [found.job for found in served_jobs()] == ["alive"]
    assert (alive.exists(), dead.exists()) == (True, False)


def test_entries_of_other_machines_are_left_alone(home):
    path = register(entry(host="elsewhere", pid=dead_pid()))
    assert served_jobs() == []
    assert path.exists()


def test_files_that_are_not_entries_are_left_alone(home):
    register(entry())
    for name, content in (("x.json", b"{"), ("y.json", b'{"pid": "x"}'), ("z.txt", b""), (".draft.json", b"\xff")):
        (home / "jobs" / name).write_bytes(content)
    assert len(served_jobs()) == 1
    assert len(list((home / "jobs").iterdir())) == 5


def test_entries_are_listed_oldest_first(home):
    for number in (2.0, 1.0, 3.0):
        register(entry(job=f"j{number}", started_at=number))
    assert [found.started_at for found in served_jobs()] == [1.0, 2.0, 3.0]


def test_entries_are_in_the_documented_folders(monkeypatch, tmp_path):
    assert folders() == (tmp_path / "home" / "jobs",)
    monkeypatch.delenv("MIDSTREAM_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    at_home = tmp_path / ".midstream" / "jobs"
    assert folders() == (tmp_path / "midstream", at_home)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "gone"))
    assert folders() == (at_home,)
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    assert folders() == (at_home,)
