"""A checkpoint belongs to one flow, and remembers what each committed epoch was."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from midstream import Flow, ListSource, NoopSink
from midstream.errors import CheckpointError
from midstream.flow.functions import Blob
from midstream.flow.model import Graph
from midstream.ids import Digest, Epoch, Revision
from midstream.runtime.checkpoint import FORMAT, Checkpoint, Manifest


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
    return Manifest(Epoch(epoch), Revision(1), (Digest("ab"),), (0, 1), 1.5, {"score": (10, 9)})


def test_looking_writes_nothing(tmp_path):
    Checkpoint.look(str(tmp_path / "job"), graph_of())
    assert list(tmp_path.iterdir()) == []


def test_a_claimed_folder_says_whose_it_is(tmp_path):
    checkpoint = claimed(tmp_path / "job")
    found = json.loads((tmp_path / "job" / "midstream.json").read_text())
    assert found["flow"] == "fraud"
    assert found["sources"] == ["cards", "payments"]
    assert found["format"] == FORMAT
    assert found["job"] == checkpoint.identity.job


def test_the_same_flow_goes_on_as_the_same_job(tmp_path):
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


@pytest.mark.parametrize("damage", [lambda data: data[:-10], lambda data: data.replace(b"9", b"8"), lambda data: b""])
def test_a_damaged_manifest_is_an_error_and_not_a_wrong_answer(tmp_path, damage):
    checkpoint = claimed(tmp_path)
    checkpoint.commit(manifest(3))
    path = tmp_path / "epochs" / "0000000003"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(CheckpointError, match=r"the manifest of epoch 3 .* is damaged"):
        checkpoint.manifest(Epoch(3))


def test_an_epoch_goes_on_from_the_manifest_of_the_one_before(tmp_path):
    checkpoint = claimed(tmp_path)
    assert checkpoint.manifest_before(Epoch(0)) is None
    assert checkpoint.newest_manifest() is None
    checkpoint.commit(manifest(0))
    checkpoint.commit(manifest(1))
    assert checkpoint.manifest_before(Epoch(1)) == manifest(0)
    assert checkpoint.newest_manifest() == manifest(1)
    with pytest.raises(CheckpointError, match="has no manifest of epoch 4"):
        checkpoint.manifest_before(Epoch(5))


def test_two_jobs_are_never_the_same(tmp_path):
    assert claimed(tmp_path / "a").identity.job != claimed(tmp_path / "b").identity.job


def test_another_flow_is_refused(tmp_path):
    claimed(tmp_path)
    with pytest.raises(
        CheckpointError, match="belongs to the flow 'fraud', not to 'clicks'; give each flow a checkpoint"
    ):
        Checkpoint.look(str(tmp_path), graph_of("clicks"))


def test_other_sources_are_refused(tmp_path):
    claimed(tmp_path)
    with pytest.raises(
        CheckpointError, match=r"with the sources cards, payments; the flow now has cards, shops\. Offsets"
    ):
        Checkpoint.look(str(tmp_path), graph_of(sources=("cards", "shops")))


def test_a_folder_with_other_things_in_it_is_refused(tmp_path):
    for name in "abcdef":
        (tmp_path / name).touch()
    with pytest.raises(CheckpointError, match=r"holds other things \(a, b, c, d, e, …\) and no midstream.json"):
        Checkpoint.look(str(tmp_path), graph_of())


def test_a_file_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="file' is a file; give a folder"):
        Checkpoint.look(str(tmp_path / "file"), graph_of())


@pytest.mark.parametrize("content", ["", "{", "{}", '{"format": "one"}'])
def test_an_identity_that_cannot_be_read_is_damage(tmp_path, content):
    (tmp_path / "midstream.json").write_text(content)
    with pytest.raises(CheckpointError, match="is damaged, or was written by another version"):
        Checkpoint.look(str(tmp_path), graph_of())


def test_an_identity_cut_anywhere_is_damage(tmp_path):
    claimed(tmp_path)
    path = tmp_path / "midstream.json"
    whole = path.read_bytes()
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        for look in (lambda: Checkpoint.look(str(tmp_path), graph_of()), lambda: Checkpoint.of_any_flow(str(tmp_path))):
            with pytest.raises(CheckpointError, match="is damaged, or was written by another version"):
                look()


def test_an_identity_with_a_wrong_byte_is_refused_or_is_another_jobs(tmp_path):
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
            assert (found.format, found.flow, found.sources) == (before.format, before.flow, before.sources)
    assert passed <= len(before.job) + len(before.version)


def test_another_format_is_refused_with_both_numbers(tmp_path):
    claimed(tmp_path)
    path = tmp_path / "midstream.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format": 99, "version": "9.9"}))
    with pytest.raises(
        CheckpointError, match=rf"has format 99 \(midstream 9.9\); this midstream .* reads format {FORMAT}"
    ):
        Checkpoint.look(str(tmp_path), graph_of())


def test_a_manifest_comes_back_as_it_was_written(tmp_path):
    checkpoint = claimed(tmp_path)
    checkpoint.commit(manifest(7))
    assert claimed(tmp_path).manifest(Epoch(7)) == manifest(7)
    assert checkpoint.manifest(Epoch(8)) is None


def test_an_epoch_that_is_committed_again_replaces_its_manifest(tmp_path):
    checkpoint = claimed(tmp_path)
    checkpoint.commit(manifest(0))
    again = Manifest(Epoch(0), Revision(2), (), (), 2.0, {})
    checkpoint.commit(again)
    assert checkpoint.manifest(Epoch(0)) == again


def test_blobs_lie_in_the_checkpoint_and_spark_has_a_folder_of_its_own(tmp_path):
    checkpoint = claimed(tmp_path)
    digest = checkpoint.blobs.put(Blob.of(b"model"))
    assert (tmp_path / "blobs" / digest[:2] / digest).read_bytes() == b"model"
    assert checkpoint.spark_location.endswith(f"{tmp_path}/spark")
    assert claimed(tmp_path).blobs.get(digest) == b"model"
