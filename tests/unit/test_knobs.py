"""Knobs: what is taken and refused, and what becomes of tuned values through changes, reverts and restarts."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from midstream import Flow, GeneratorSource, ListSource, MemorySink, Tune, Update
from midstream.change.configuration import configuration_of, first_configuration
from midstream.change.restart import restart_of
from midstream.change.revert import taken_back, undoing
from midstream.change.trial import TRIAL_EPOCHS, Changes, Request, RunFailure
from midstream.checkpoint.change_log import ChangeLog
from midstream.checkpoint.change_records import Outcome
from midstream.checkpoint.location import Checkpoint
from midstream.checkpoint.retention import KEPT_REVISIONS, blobs_on_record
from midstream.cli.tune import parsed_knobs
from midstream.control.messages import Commit
from midstream.engine.collector import Collector
from midstream.engine.key_sampler import KeySampler
from midstream.engine.nodes import node_of
from midstream.engine.slices import SliceSizer
from midstream.errors import FlowError
from midstream.flow.knobs import KNOBS, values_of
from midstream.flow.model import KeyBy, Operator, Port
from midstream.ids import Epoch, PartitionId, Revision, StageIndex, WireId
from midstream.planner.change_plan import Scheduler
from midstream.planner.stages import Leaves, Wire
from midstream.runtime.spark.pace import Pacer, RowLimit, read_row_limit, require_pace
from midstream.storage.blobs import BlobStore
from midstream.testing import ChangeAt, run_local


def flow_of(sink: Any = None, source: Any = None) -> Flow:
    flow = Flow("knobs")
    rows = flow.source("in", source or ListSource([[{"n": n}] for n in range(6)], "n bigint"))
    rows.map("m", same).sink("out", sink or MemorySink())
    return flow


def same(row: Any) -> Any:
    return row


class TestTune:
    @pytest.mark.parametrize("name", KNOBS)
    def test_every_knob_takes_its_ends_and_refuses_what_lies_beyond(self, name: str) -> None:
        knob = KNOBS[name]
        assert values_of({name: knob.least}) == {name: knob.least}
        assert values_of({name: knob.most}) == {name: knob.most}
        for beyond in (knob.least - 1, knob.most + 1):
            with pytest.raises(FlowError, match=rf"{name}={beyond} is out of range; give .* from .* to"):
                Tune(**{name: beyond})

    @pytest.mark.parametrize(
        ("knobs", "says"),
        [
            ({"paec": 1}, "there is no knob 'paec'; did you mean 'pace'"),
            ({"volume": 1}, "there is no knob 'volume'. Knobs: pace, rows_per_epoch"),
            ({"pace": "fast"}, "pace='fast' cannot be read; give a length of time from 0 ms to 3600 s"),
            ({"frame": "1 second"}, "frame='1 second' cannot be read; give a size"),
            ({"rows_per_epoch": "1 MB"}, "rows_per_epoch='1 MB' cannot be read; give a number of rows"),
            ({"slice": True}, "slice=True cannot be read"),
            ({"slice": 1.5}, "slice=1.5 cannot be read"),
            ({"slice": "-1 ms"}, "slice='-1 ms' cannot be read"),
            ({}, "sets no knob; knobs: pace"),
        ],
    )
    def test_unknown_knobs_and_invalid_values_are_refused_with_what_is_allowed(self, knobs: Any, says: str) -> None:
        with pytest.raises(FlowError) as refused:
            Tune(**knobs)
        assert says in str(refused.value)

    def test_numbers_and_texts_mean_the_same(self) -> None:
        assert Tune(pace="1 second", frame="1 MiB") == Tune(pace=1_000_000, frame="1048576")
        assert repr(Tune(pace="1 ms", slice=None)) == "Tune(pace=1000, slice=None)"

    def test_the_command_line_reads_pairs(self) -> None:
        assert parsed_knobs(["pace=1 s", "frame=default"]) == {"pace": "1 s", "frame": None}
        for text in ("pace", "pace="):
            with pytest.raises(FlowError, match="is not KNOB=VALUE"):
                parsed_knobs([text])
        with pytest.raises(FlowError, match="given twice"):
            parsed_knobs(["pace=1", "pace=2"])


class TestRefused:
    def refused(self, *edits: Any, flow: Flow | None = None) -> str:
        with pytest.raises(FlowError) as error:
            run_local(flow or flow_of(), changes=[ChangeAt.of(0, *edits)])
        return str(error.value)

    def test_a_knob_tuned_twice(self) -> None:
        assert "knob pace is tuned twice" in self.refused(Tune(pace=1), Tune(pace=2))

    def test_a_limit_of_rows_for_a_list(self) -> None:
        assert "'in' is none: a ListSource says its epochs itself" in self.refused(Tune(rows_per_epoch=10))

    def test_knobs_that_only_spark_has(self) -> None:
        assert "knob batch is for Spark" in self.refused(Tune(batch="1 MiB"))
        source = GeneratorSource(lambda index, rng: {"n": index}, "n bigint", rate=1000, limit=10)
        assert "knob rows_per_epoch is for Spark" in self.refused(Tune(rows_per_epoch=10), flow=flow_of(source=source))

    def test_a_value_that_the_job_has(self) -> None:
        assert "slice is 5 ms already" in self.refused(Tune(slice="5 ms"))

    def test_a_pace_below_the_trigger(self) -> None:
        require_pace(500_000, 500_000)
        require_pace(1, None)
        with pytest.raises(FlowError, match="pace=100 ms is less than the trigger of 500 ms"):
            require_pace(100_000, 500_000)


class TestLife:
    def test_a_tuning_is_on_trial_in_the_history_and_can_be_taken_back(self) -> None:
        out = MemorySink()
        changes = [ChangeAt.of(1, Tune(slice="1 ms")), ChangeAt.of(3, Tune(slice=None, pace="1 s"))]
        run = run_local(flow_of(out), changes=changes)
        first, second = run.history
        assert [str(each) for each in (*first.edits, *second.edits)] == ["slice: 1 ms", "slice: 5 ms, pace: 1000 ms"]
        assert first.outcome is second.outcome is Outcome.APPLIED
        assert "waits for the next epoch: the tasks of an epoch have the same knobs" in first.plan
        assert "slice: 5 ms → 1 ms" in first.plan
        assert [row["n"] for row in out.rows] == list(range(6))

    def test_a_tuning_and_other_edits_can_be_one_change(self) -> None:
        out = MemorySink()
        update = Update("m", lambda row: {"n": -row["n"]})
        run = run_local(flow_of(out), changes=[ChangeAt.of(2, update, Tune(frame="64 KiB"), scheduler="epoch")])
        [record] = run.history
        assert record.subjects == "m, knob frame"
        assert record.outcome is Outcome.APPLIED
        assert min(row["n"] for row in out.rows) < 0


def graph_of() -> Any:
    return flow_of().graph


class Job:
    """Changes of a job without epochs."""

    def __init__(self, folder: Path, **knobs: int) -> None:
        self.folder = folder
        self.store, self.log = BlobStore(str(folder / "blobs")), ChangeLog(str(folder / "changes"))
        self.first = first_configuration(graph_of(), self.store, 2, knobs=knobs)
        self.changes = Changes(self.first, self.store, self.log)

    def tune(self, **knobs: Any) -> Any:
        return self.request(Tune(**knobs))

    def request(self, *edits: Any) -> Any:
        request = self.changes.store(Request(edits, Scheduler.FRIES, "ann"))
        return self.changes.request(request, self.changes.check(request), 0.0)

    def commit(self, epoch: int = 0) -> None:
        opened = self.changes.configuration
        self.changes.opened(Epoch(epoch))
        self.changes.committed(Commit(Epoch(epoch), opened.revision, (), 0, {}), opened)

    def restart(self, committed: int | None, **knobs: int) -> Any:
        first = first_configuration(graph_of(), self.store, 2, knobs=knobs)
        return restart_of(first, self.store, self.log.records(), None if committed is None else Revision(committed))


class TestRollBackRevertAndRestart:
    def test_a_trial_that_fails_gives_the_old_values_back(self, tmp_path: Path) -> None:
        job = Job(tmp_path, slice=2000)
        change = job.tune(slice=300, pace=10)
        assert job.changes.configuration.knobs == {"slice": 300, "pace": 10}
        opened = job.changes.configuration
        job.changes.opened(Epoch(0))
        assert job.changes.failed(RunFailure("too slow", is_overdue=True), opened)
        assert change.outcome is Outcome.ROLLED_BACK
        assert job.changes.configuration.knobs == {"slice": 2000}

    def test_a_revert_restores_the_values_of_that_revision(self, tmp_path: Path) -> None:
        job = Job(tmp_path, slice=2000)
        for knobs in ({"slice": 300}, {"pace": 10}, {"slice": 400}):
            job.tune(**knobs)
            job.commit()
        records = job.log.records()
        back = undoing(records, Revision(2), job.changes.configuration, job.store)
        assert back.edits == (Tune(pace=None, slice=300),)
        offline = taken_back(records, Revision(1), Revision(4), job.store, {}, by="ann", now=0.0, how="offline")
        assert offline.record is not None
        assert offline.record.tuned == {"pace": None, "slice": 2000}
        job.request(*back.edits)
        assert job.changes.configuration.knobs == {"slice": 300}

    def test_a_restart_keeps_tuned_values_and_says_so_until_the_script_has_them(self, tmp_path: Path) -> None:
        job = Job(tmp_path, pace=5)
        job.tune(pace=10, frame=8192)
        job.commit()
        again = job.restart(2, pace=5)
        assert again.configuration.knobs == {"pace": 10, "frame": 8192}
        assert [message.partition(",")[0] for message in again.messages] == [
            "knob pace is 0.01 ms",
            "knob frame is 8 KiB",
        ]
        assert job.restart(2, pace=10, frame=8192).messages == ()
        assert job.restart(2, pace=10, frame=8192, slice=300).configuration.knobs["slice"] == 300

    def test_a_value_on_trial_when_the_driver_died_goes_on_trial_again(self, tmp_path: Path) -> None:
        job = Job(tmp_path)
        job.tune(pace=10)
        again = job.restart(1)
        assert again.pending is not None
        assert again.configuration.knobs == {}
        assert again.pending.prepared.after.knobs == {"pace": 10}
        settled = job.restart(1, pace=10)  # the script says the same by now
        assert settled.pending is None
        assert [each.outcome for each in settled.settled] == [Outcome.REFUSED]
        assert settled.configuration.knobs == {"pace": 10}

    def test_many_tunings_do_not_push_functions_out_of_the_history(self, tmp_path: Path) -> None:
        job = Job(tmp_path)
        job.request(Update("m", lambda row: row))
        for _ in range(TRIAL_EPOCHS):
            job.commit()
        [update] = job.log.records()[0].updates
        for value in range(1, KEPT_REVISIONS + 3):
            job.tune(pace=value)
            job.commit()
        assert {update.before, update.function} <= blobs_on_record(job.log.records())

    def test_a_real_restart_goes_on_with_tuned_values(self, tmp_path: Path) -> None:
        folder = str(tmp_path / "job")
        run_local(flow_of(), checkpoint=folder, changes=[ChangeAt.of(2, Tune(slice="1 ms", key_sample=0))])
        run_local(flow_of(), checkpoint=folder)
        found = Checkpoint.of_any_flow(folder)
        manifest = found.newest_manifest()
        assert manifest is not None
        assert configuration_of(manifest, found.blobs).knobs == {
            "slice": 1000,
            "key_sample": 0,
        }


class TestWhatTheyDo:
    def test_slices_aim_at_their_length(self) -> None:
        sizer = SliceSizer(100)
        sizer.target_ns = 1_000_000
        sizer.observe(rows=100, elapsed_ns=2_000_000)
        assert sizer.rows == 50

    def test_frames_leave_at_their_size(self) -> None:
        def frames(size: int) -> int:
            collector = Collector(Leaves.FRAMES, PartitionId(0), StageIndex(1), {}, frame_bytes=size)
            wire = Wire(WireId(0), Port("m"), StageIndex(0), None, ("out",), None, 0)
            for _ in range(8):
                collector.add(wire, pa.record_batch({"n": list(range(1024))}), Revision(1))
            return len(collector.take()) + len(collector.finish())

        assert frames(1 << 20) == 1
        assert frames(8192) == 8

    def test_no_rows_are_sampled_for_heavy_keys_if_the_knob_is_zero(self) -> None:
        key_by = Operator("by k", KeyBy(("k",)), (Port("in"),), pa.schema([("k", pa.int64())]))
        assert node_of(key_by, Revision(1), 0).keys is None
        assert node_of(key_by, Revision(1), 1).keys is not None

    def test_the_knob_decides_how_many_rows_of_a_slice_are_sampled(self) -> None:
        few, more = KeySampler(["k"], 1), KeySampler(["k"], 4)
        for sampler in (few, more):
            sampler.note(pa.record_batch({"k": [1, 2, 3, 4]}), 0)
        assert [sum(each.found().counts.values()) for each in (few, more)] == [4, 4]
        assert [len(each.found().counts) for each in (few, more)] == [1, 4]

    def test_the_file_of_the_limit_exists_as_long_as_there_is_a_limit(self) -> None:
        limit = RowLimit()
        assert read_row_limit(limit.path) is None
        limit.set(7)
        assert read_row_limit(limit.path) == 7
        limit.set(None)
        assert read_row_limit(limit.path) is None
        limit.close()
        assert not Path(limit.path).exists()

    def test_a_wait_ends_when_the_pace_is_tuned_down_or_the_job_stops(self) -> None:
        pace, began = [3_600_000_000], time.monotonic()
        pacer = Pacer(lambda: pace[0], lambda: True)
        waits = [threading.Thread(target=pacer.wait, args=(began,)) for _ in range(2)]
        for each in waits:
            each.start()
        pace[0] = 0
        pacer.hurry()
        for each in waits:
            each.join(60)
        pace[0] = 3_600_000_000
        pacer.end()
        pacer.wait(began)
        assert time.monotonic() - began < 60

    def test_a_wait_ends_with_the_query(self) -> None:
        began = time.monotonic()
        Pacer(lambda: 3_600_000_000, lambda: False).wait(began)
        assert time.monotonic() - began < 60
