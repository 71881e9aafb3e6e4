"""A checkpoint belongs to one flow, and has a manifest of each committed epoch."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from midstream import Flow, ListSource, NoopSink
from midstream.checkpoint.location import Checkpoint
from midstream.checkpoint.manifest import Manifest
from midstream.errors import CheckpointError
from midstream.flow.model import Graph
from midstream.ids import Digest, Epoch, PartitionId, Revision, Run
from midstream.state.files import Author, FileKind, table_of
from midstream.state.lineage import Lineage
from midstream.storage.blobs import Blob
from midstream.storage.documents import FORMAT
from tests.power_loss import AllSynced, Recorder, Synced


def graph_of(name: str = "fraud", sources: tuple[str, ...] = ("payments", "cards")) -> Graph:
    flow = Flow(name)
    for source in sources:
        flow.source(source, ListSource([[]], "n bigint")).sink(f"out of {source}", NoopSink())
    return flow.graph


def claimed(location: Path | str, graph: Graph | None = None) -> Checkpoint:
    checkpoint = Checkpoint.look(str(location), graph or graph_of())
    checkpoint.claim()
    checkpoint.release()
    return checkpoint


def manifest(epoch: int) -> Manifest:
    return Manifest(Epoch(epoch), Revision(1), (Digest("ab"),), Digest("cd"), 1.5, {"score": (10, 9)})


def test_opening_a_checkpoint_to_read_writes_nothing(tmp_path):
    Checkpoint.look(str(tmp_path / "job"), graph_of())
    assert list(tmp_path.iterdir()) == []


def test_a_claimed_folder_has_the_identity_of_its_flow(tmp_path):
    checkpoint = claimed(tmp_path / "job")
    found = json.loads((tmp_path / "job" / "midstream.json").read_text())
    assert found["flow"] == "fraud"
    assert found["sources"] == ["cards", "payments"]
    assert found["format"] == FORMAT
    assert found["job"] == checkpoint.identity.job


def test_the_same_flow_continues_as_the_same_job(tmp_path):
    first = claimed(tmp_path)
    assert claimed(tmp_path).identity == first.identity
    # The order in which sources were added does not matter, nor does anything else about the flow.
    assert claimed(tmp_path, graph_of(sources=("cards", "payments"))).identity == first.identity


def test_a_checkpoint_in_use_is_refused_until_it_is_released(tmp_path):
    first, second = Checkpoint.look(str(tmp_path), graph_of()), Checkpoint.look(str(tmp_path), graph_of())
    first.claim()
    with pytest.raises(CheckpointError, match=rf"in use by process {os.getpid()} on .*; stop that job first"):
        second.claim()
    first.release()
    second.claim()
    second.release()


def test_a_lock_that_a_dead_driver_left_behind_does_not_matter(tmp_path):
    (tmp_path / "lock").write_text("process 1 on elsewhere")
    assert claimed(tmp_path).identity.flow == "fraud"


DAMAGES = {
    "cut": lambda data: data[:-10],
    "other": lambda data: data.replace(b"9", b"8"),
    "empty": lambda data: b"",
    "zeros": lambda data: bytes(len(data)),
    "without its last line": lambda data: data.rpartition(b"\n")[0],
}


def damage(folder: Path, epoch: int, how: str) -> None:
    path = folder / "epochs" / f"{epoch:010d}"
    path.write_bytes(DAMAGES[how](path.read_bytes()))


def committed_by_spark(folder: Path, *epochs: int) -> None:
    for epoch in epochs:
        path = folder / "spark" / "commits" / str(epoch)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("v1\n{}")


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Checkpoint]:
    """A checkpoint in use, with three epochs."""
    checkpoint = Checkpoint.look(str(tmp_path), graph_of())
    checkpoint.claim()
    for epoch in range(3):
        checkpoint.commit(manifest(epoch))
    yield checkpoint
    checkpoint.release()


@pytest.mark.parametrize("how", DAMAGES)
def test_a_torn_newest_manifest_of_an_epoch_that_spark_has_not_committed_is_set_aside(running, tmp_path, caplog, how):
    committed_by_spark(tmp_path, 0, 1)
    damage(tmp_path, 2, how)
    torn = (tmp_path / "epochs" / "0000000002").read_bytes()
    assert running.newest_manifest() == manifest(1)
    assert running.manifest(Epoch(2)) is None
    assert running.manifest_before(Epoch(2)) == manifest(1)
    [message] = [record.getMessage() for record in caplog.records]
    assert "the manifest of epoch 2" in message
    assert "torn by a crash" in message
    assert (tmp_path / "epochs" / "0000000002.torn").read_bytes() == torn
    running.commit(manifest(2))
    assert running.newest_manifest() == manifest(2)


def test_a_reader_ignores_a_torn_manifest_and_changes_nothing(running, tmp_path):
    damage(tmp_path, 2, "empty")
    running.release()
    before = sorted(path.name for path in (tmp_path / "epochs").iterdir())
    for looking in (Checkpoint.look(str(tmp_path), graph_of()), Checkpoint.of_any_flow(str(tmp_path))):
        assert looking.newest_manifest() == manifest(1)
    assert sorted(path.name for path in (tmp_path / "epochs").iterdir()) == before


@pytest.mark.parametrize("how", DAMAGES)
def test_a_torn_manifest_of_an_epoch_that_spark_has_committed_names_the_epoch_to_go_back_to(running, tmp_path, how):
    committed_by_spark(tmp_path, 0, 1, 2)
    damage(tmp_path, 2, how)
    for read in (
        running.newest_manifest,
        lambda: running.manifest(Epoch(2)),
        lambda: running.manifest_before(Epoch(3)),
    ):
        with pytest.raises(
            CheckpointError, match=r"the manifest of epoch 2 .* is damaged.*go back to epoch 1, the last"
        ):
            read()
    assert (tmp_path / "epochs" / "0000000002").exists()


@pytest.mark.parametrize("torn", [b"", b"v1\n", b'v1\n{"nextBatch', bytes(30)])
def test_a_torn_commit_in_sparks_log_is_set_aside_and_does_not_count(running, tmp_path, torn, caplog):
    committed_by_spark(tmp_path, 0, 1, 2)
    commits = tmp_path / "spark" / "commits"
    (commits / "2").write_bytes(torn)
    (commits / ".2.crc").write_bytes(b"of Hadoop")
    running.release()
    running.claim()
    assert sorted(path.name for path in commits.iterdir()) == [".2.crc", "0", "1", "2.torn"]
    assert "Spark's commits of epoch 2" in caplog.text
    damage(tmp_path, 2, "cut")
    assert running.newest_manifest() == manifest(1), "nobody has committed epoch 2"


def test_going_back_as_the_message_says_is_enough(running, tmp_path):
    committed_by_spark(tmp_path, 0, 1, 2)
    damage(tmp_path, 2, "cut")
    for folder in ("epochs", "spark/commits"):
        for path in (tmp_path / folder).iterdir():
            if int(path.name) > 1:
                path.unlink()
    assert running.newest_manifest() == manifest(1)
    assert running.manifest(Epoch(2)) is None


def test_only_the_newest_manifest_can_be_torn_by_a_crash(running, tmp_path):
    damage(tmp_path, 1, "empty")
    with pytest.raises(CheckpointError, match=r"the manifest of epoch 1 .* is damaged.*go back to epoch 0"):
        running.manifest(Epoch(1))
    damage(tmp_path, 2, "empty")
    with pytest.raises(CheckpointError, match=r"the manifest of epoch 1 .* is damaged.*go back to epoch 0"):
        running.newest_manifest()


def test_an_epoch_whose_state_files_are_gone_is_not_offered_to_go_back_to(running, tmp_path):
    author = Author("total", Epoch(1), Run(0), PartitionId(0), attempt=0)
    ref = running.states.write(table_of([b"\x01\x00a"], [b"1"]), FileKind.DELTA, author)
    lineage = Lineage.start("total").after(Epoch(1), [ref]).encode()
    running.commit(msgspec.structs.replace(manifest(1), lineages={"total": lineage}))
    committed_by_spark(tmp_path, 2)
    damage(tmp_path, 2, "cut")
    with pytest.raises(CheckpointError, match="go back to epoch 1"):
        running.manifest(Epoch(2))
    running.states.remove([ref.name])
    with pytest.raises(CheckpointError, match="go back to epoch 0"):
        running.manifest(Epoch(2))
    for epoch in (0, 1):
        (tmp_path / "epochs" / f"{epoch:010d}").unlink()
    with pytest.raises(CheckpointError, match=r"there is no earlier epoch.*must start from the beginning"):
        running.manifest(Epoch(2))


def test_a_first_start_that_was_killed_at_once_can_be_repeated(tmp_path):
    (tmp_path / "lock").touch()
    (tmp_path / "midstream.json.4711.tmp").write_bytes(b'{"form')
    assert claimed(tmp_path).identity.flow == "fraud"


def test_claiming_syncs_what_an_earlier_process_left(tmp_path):
    recorder = Recorder()
    with recorder.recording():
        claimed(tmp_path / "job")
        assert AllSynced() not in recorder.operations  # there was nothing
        claimed(tmp_path / "job")
        assert recorder.operations.count(AllSynced()) == 1


def test_without_durability_nothing_waits_for_the_disk(tmp_path):
    recorder = Recorder()
    with recorder.recording():
        for _ in range(2):
            checkpoint = Checkpoint.look(str(tmp_path / "job"), graph_of(), durable=False)
            checkpoint.claim()
            checkpoint.commit(manifest(0))
            checkpoint.blobs.put(Blob.of(b"model"))
            checkpoint.release()
    assert recorder.operations
    assert not any(isinstance(operation, Synced | AllSynced) for operation in recorder.operations)


def test_an_epoch_continues_from_the_previous_manifest(tmp_path):
    checkpoint = claimed(tmp_path)
    assert checkpoint.manifest_before(Epoch(0)) is None
    assert checkpoint.newest_manifest() is None
    checkpoint.commit(manifest(0))
    checkpoint.commit(manifest(1))
    assert checkpoint.manifest_before(Epoch(1)) == manifest(0)
    assert checkpoint.newest_manifest() == manifest(1)
    with pytest.raises(CheckpointError, match="has no manifest of epoch 4"):
        checkpoint.manifest_before(Epoch(5))


def test_two_jobs_have_different_identities(tmp_path):
    assert claimed(tmp_path / "a").identity.job != claimed(tmp_path / "b").identity.job


def test_another_flow_is_refused(tmp_path):
    claimed(tmp_path)
    with pytest.raises(
        CheckpointError, match="belongs to the flow 'fraud', not to 'clicks'; use a separate checkpoint"
    ):
        Checkpoint.look(str(tmp_path), graph_of("clicks"))


def test_other_sources_are_refused(tmp_path):
    claimed(tmp_path)
    with pytest.raises(
        CheckpointError,
        match=r"reads the sources cards, payments; the flow now has cards, shops\. Sources change while",
    ):
        Checkpoint.look(str(tmp_path), graph_of(sources=("cards", "shops")))


def test_a_folder_with_other_things_in_it_is_refused(tmp_path):
    for name in "abcdef":
        (tmp_path / name).touch()
    with pytest.raises(CheckpointError, match=r"holds other things \(a, b, c, d, e, …\) and no midstream.json"):
        Checkpoint.look(str(tmp_path), graph_of())


def test_a_file_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="file' is a file; it must be a folder"):
        Checkpoint.look(str(tmp_path / "file"), graph_of())


@pytest.mark.parametrize("content", ["", "{", "{}", '{"format": "one"}'])
def test_an_identity_that_cannot_be_read_is_damage(tmp_path, content):
    (tmp_path / "midstream.json").write_text(content)
    with pytest.raises(CheckpointError, match="is damaged, or is not a document of midstream"):
        Checkpoint.look(str(tmp_path), graph_of())


def test_an_identity_cut_anywhere_is_damage(tmp_path):
    claimed(tmp_path)
    path = tmp_path / "midstream.json"
    whole = path.read_bytes()
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        for look in (lambda: Checkpoint.look(str(tmp_path), graph_of()), lambda: Checkpoint.of_any_flow(str(tmp_path))):
            with pytest.raises(CheckpointError, match="is damaged, or is not a document of midstream"):
                look()


def test_an_identity_with_a_wrong_byte_is_refused_or_names_another_job(tmp_path):
    # It has no checksum, because all that matters in it is compared with something else. Under another job's name local
    # copies of state are not used, and the folders of sinks are not written.
    before = claimed(tmp_path).identity
    path = tmp_path / "midstream.json"
    whole = path.read_bytes()
    passed = 0
    for position in range(len(whole)):
        for wrong in (0, 0xFF, whole[position] ^ 1):
            path.write_bytes(whole[:position] + bytes([wrong]) + whole[position + 1 :])
            try:
                found = Checkpoint.look(str(tmp_path), graph_of()).identity
            except CheckpointError:
                continue
            passed += 1
            assert (found.job, found.version) != (before.job, before.version)
            assert (found.flow, found.sources) == (before.flow, before.sources)
    assert passed <= len(before.job) + len(before.version)


@pytest.mark.parametrize(
    ("format", "says"),
    [
        (99, rf"is newer than format {FORMAT} of this midstream .*Upgrade midstream"),
        (3, rf"is older than format {FORMAT}, the first .*Start with a new checkpoint"),
    ],
)
def test_another_format_is_refused_with_both_numbers_and_advice(tmp_path, format, says):
    claimed(tmp_path)
    path = tmp_path / "midstream.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format": format, "version": "9.9"}))
    for look in (lambda: Checkpoint.look(str(tmp_path), graph_of()), lambda: Checkpoint.of_any_flow(str(tmp_path))):
        with pytest.raises(CheckpointError, match=rf"has format {format} \(written by midstream 9.9\), which {says}"):
            look()


def test_a_manifest_comes_back_as_it_was_written(tmp_path):
    checkpoint = claimed(tmp_path)
    checkpoint.commit(manifest(7))
    assert claimed(tmp_path).manifest(Epoch(7)) == manifest(7)
    assert checkpoint.manifest(Epoch(8)) is None


def test_an_epoch_that_is_committed_again_replaces_its_manifest(tmp_path):
    checkpoint = claimed(tmp_path)
    checkpoint.commit(manifest(0))
    again = Manifest(Epoch(0), Revision(2), (), Digest("ef"), 2.0, {})
    checkpoint.commit(again)
    assert checkpoint.manifest(Epoch(0)) == again


def test_blobs_are_in_the_checkpoint_and_spark_has_its_own_folder(tmp_path):
    checkpoint = claimed(tmp_path)
    digest = checkpoint.blobs.put(Blob.of(b"model"))
    assert (tmp_path / "blobs" / digest[:2] / digest).read_bytes() == b"model"
    assert checkpoint.spark_location.endswith(f"{tmp_path}/spark")
    assert claimed(tmp_path).blobs.get(digest) == b"model"
