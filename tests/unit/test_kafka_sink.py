"""The description of a Kafka sink, and which records count for readers of its epochs' topic."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from examples.kafka import jars
from midstream import Flow, Insert, KafkaSink, ListSource, MemorySink, runs_that_count
from midstream.errors import FlowError, SchemaError, SetupError
from midstream.flow.kafka_notes import EpochNote
from midstream.ids import Epoch
from midstream.runtime.spark.session import packages_conf, require_loaded
from midstream.testing import ChangeAt, run_local
from tests.brokers import kafka_broker
from tests.examples import examples
from tests.sink_flows import flow_to

DDL = "user string, n bigint, payload binary, price double"


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: KafkaSink("", "t"), "servers is ''; give a text such as 'broker:9092'"),
        (lambda: KafkaSink("b:1", None), "topic is None; give a text"),  # type: ignore[arg-type]  # the point
        (lambda: KafkaSink("b:1", "t", epochs_topic="t"), "epochs_topic is 't' as well"),
        (lambda: KafkaSink("b:1", "t", options={"topic": "u"}), "options has topic, which the sink sets itself"),
    ],
)
def test_invalid_parameters_are_refused(make: Any, says: str) -> None:
    with pytest.raises(FlowError, match=f"KafkaSink: {says}"):
        make()


@pytest.mark.parametrize(
    ("sink", "says"),
    [
        (KafkaSink("b:1", "t", key="usr"), "sink 'out0', key: there is no column 'usr'; did you mean 'user'"),
        (KafkaSink("b:1", "t", key="price"), "column 'price' is double, and the key of a record is text, binary or a"),
        (KafkaSink("b:1", "t", value="n"), "column 'n' is bigint, and the value of a record is text or binary"),
    ],
)
def test_columns_that_cannot_be_keys_or_values_are_refused(sink: KafkaSink, says: str) -> None:
    with pytest.raises(SchemaError, match=says):
        flow_to(sink, ddl=DDL)
    for key in ("user", "n", "payload", None):
        flow_to(KafkaSink("b:1", "t", key=key, value="payload"), ddl=DDL)


def test_the_local_runtime_refuses_it() -> None:
    with pytest.raises(FlowError, match="sink 'out0' is a KafkaSink, which needs Spark; on the local runtime use a"):
        run_local(flow_to(KafkaSink("b:1", "t"), ddl=DDL))


def test_the_local_runtime_refuses_a_change_that_inserts_it() -> None:
    flow = Flow("shop")
    flow.source("in", ListSource([[{"n": 1}], [{"n": 2}]], "n int")).sink("out", MemorySink())
    insert = Insert(lambda rows: rows.sink("more", KafkaSink("b:1", "t")), after="in")
    with pytest.raises(FlowError, match="sink 'more' is a KafkaSink, which needs Spark"):
        run_local(flow, changes=[ChangeAt.of(1, insert, scheduler="epoch")])


def test_options_for_a_client_are_those_that_the_connector_hands_on() -> None:
    sink = KafkaSink("b:1", "t", options={"kafka.security.protocol": "SSL", "topicSuffix": "x"})
    assert sink.client == {"bootstrap.servers": "b:1", "security.protocol": "SSL"}


# ── which runs count ──────────────────────────────────────────────────────────────────────────────────────────────


def note(epoch: int, run: str = "", sink: str = "out") -> bytes:
    return msgspec.json.encode(EpochNote("j", sink, Epoch(epoch), run))


def counting(*notes: bytes) -> dict[int, str]:
    return {epoch: run for (_, sink, epoch), run in runs_that_count(notes).items() if sink == "out"}


def test_the_last_run_of_a_committed_epoch_counts() -> None:
    assert counting(note(0, "a")) == {}, "begun, not committed"
    assert counting(note(0, "a"), note(0)) == {0: "a"}
    assert counting(note(0, "a"), note(0, "b"), note(0)) == {0: "b"}, "rolled back, and run again"
    assert counting(note(0, "a"), note(0), note(1, "b"), note(0), note(1, "c"), note(1)) == {0: "a", 1: "c"}


def test_records_of_a_sink_that_was_rolled_back_never_count() -> None:
    assert counting(note(3, "a"), note(2), note(7, "b"), note(7)) == {7: "b"}


def test_epochs_that_a_rewind_took_back_no_longer_count() -> None:
    before = [each for epoch in range(4) for each in (note(epoch, "old"), note(epoch))]
    assert counting(*before, note(1)) == {0: "old", 1: "old"}
    assert counting(*before, note(1), note(2, "new"), note(2)) == {0: "old", 1: "old", 2: "new"}


def test_sinks_do_not_mix() -> None:
    notes = [note(0, "a"), note(0, "b", "other"), note(0)]
    assert runs_that_count(notes) == {("j", "out", 0): "a"}


def test_a_record_that_is_not_a_note_is_reported() -> None:
    with pytest.raises(FlowError, match="b'hello' is not a record of a topic of epochs"):
        runs_that_count([b"hello"])


STEP = st.sampled_from(["commit", "fail", "crash early", "crash late", "rewind", "without", "rolled back"])


@examples(300)
@given(st.lists(STEP, max_size=30), st.randoms(use_true_random=False))
def test_readers_find_what_the_job_has_committed(steps: list[str], rng: Any) -> None:
    """A job fails, dies, goes back, loses its sink and gets it again; the oracle is what its manifests would say."""
    newest = -1
    committed: dict[int, str] = {}
    said: list[bytes] = []
    for number, step in enumerate(steps):
        run = f"run {number}"
        if step == "rewind":
            newest = rng.randint(-1, newest)
            committed = {epoch: kept for epoch, kept in committed.items() if epoch <= newest}
            said.append(note(newest))  # the next start
            continue
        if step != "without":
            said.append(note(newest + 1, run))
        if step == "rolled back":  # the sink itself was the change; the epoch goes on without it
            said.append(note(newest))
        if step in ("commit", "crash late"):
            committed[newest + 1] = run
        if step not in ("fail", "crash early"):
            newest += 1
        if step == "commit":
            said.append(note(newest))
        if step.startswith("crash"):
            said.append(note(newest))  # the next start
        if step == "fail":
            said.append(note(newest))  # the next run
    assert counting(*said) == committed


# ── what the tests themselves need ────────────────────────────────────────────────────────────────────────────────


def test_packages_are_coordinates() -> None:
    assert packages_conf(["a:b:1"], "c:d:2") == "c:d:2,a:b:1"
    for wrong in ("a:b:1", ["a:b"], ["a:b:1,c:d:2"], ["a b:c:1"]):
        with pytest.raises(SetupError, match="must be a list of Maven coordinates, 'group:artifact:version'"):
            packages_conf(wrong)
    require_loaded(["a:b:1"], "c:d:2,a:b:1")
    with pytest.raises(SetupError, match=r"Spark runs already, without e:f:3; .*Stop the running session first"):
        require_loaded(["a:b:1", "e:f:3"], "c:d:2,a:b:1")


def test_a_damaged_jar_counts_as_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MIDSTREAM_JARS", str(tmp_path))
    assert jars.present(jars.BROKER) == []
    for jar in jars.locked(jars.BROKER):
        (tmp_path / jar.file).write_bytes(b"not a jar")
    assert jars.present(jars.BROKER) == []


def test_without_jars_tests_are_skipped_with_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MIDSTREAM_JARS", str(tmp_path))
    reason = "jars of Kafka's broker are not in .*; python -m examples.kafka.jars fetches them"
    with pytest.raises(pytest.skip.Exception, match=reason), kafka_broker():
        pass


def test_the_lock_names_each_jar_once_and_in_full() -> None:
    locked = [jar for part in (jars.BROKER, jars.CONNECTOR) for jar in jars.locked(part)]
    assert len({jar.file for jar in locked}) == len(locked) > 20
    assert all(len(jar.sha256) == 64 for jar in locked)
