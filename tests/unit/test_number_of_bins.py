"""Jobs with other numbers of bins: everything they compute, keep and show is the same."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from midstream import Flow, ListSource, MemorySink, agg
from midstream.checkpoint.inspection import read_state
from midstream.checkpoint.location import Checkpoint
from midstream.cli.app import app
from midstream.errors import CheckpointError, FlowError
from midstream.ids import BinId
from midstream.state.contents import dump
from midstream.state.lineage import Lineage
from midstream.testing import run_local
from tests.fixtures.shop import ALL_EPOCHS, Oracle, run

STATEFUL = ("remember", "running", "windows", "slides", "visits", "first", "pairs", "settled", "ledger", "notebook")
OTHERS = (2, 16, 4096, 65536)


@pytest.fixture(scope="module")
def usual(tmp_path_factory):
    """The shop, which has every operator, with the usual number of bins."""
    location = str(tmp_path_factory.mktemp("usual") / "checkpoint")
    run(range(ALL_EPOCHS), location)
    return location


@pytest.mark.long
@pytest.mark.parametrize("bins", OTHERS)
def test_every_operator_gives_the_same_with_any_number_of_bins(tmp_path, usual, bins):
    location, oracle = str(tmp_path / "checkpoint"), Oracle()
    half = ALL_EPOCHS // 2
    for epochs, given in ((range(half), bins), (range(half, ALL_EPOCHS), None)):  # it keeps its number
        shop = run(epochs, location, bins=given)
        for epoch in epochs:
            assert shop.found(epoch) == oracle.expected[epoch], epoch
    assert Checkpoint.of_any_flow(location).identity.bins == bins
    for operator in (*STATEFUL, "accounts", "notes"):
        found, wanted = read_state(location, operator), read_state(usual, operator)
        assert found.schema == wanted.schema
        assert sorted(map(repr, found.to_pylist())) == sorted(map(repr, wanted.to_pylist())), operator


def dumps(location: str) -> dict[str, dict[BinId, dict[bytes, bytes]]]:
    """All that is in a checkpoint: by operator, by bin, byte for byte, without the bin in front of a key."""
    checkpoint = Checkpoint.of_any_flow(location)
    manifest = checkpoint.newest_manifest()
    assert manifest is not None
    width = checkpoint.states.space.width
    found = {}
    for name, data in manifest.lineages.items():
        lineage = Lineage.decode(data)
        found[name] = {
            number: {key[width:]: value for key, value in dump(checkpoint.states, lineage, number).items()}
            for number in lineage.bins()
        }
    return found


@pytest.mark.long
@pytest.mark.parametrize("bins", OTHERS)
def test_with_more_bins_each_bin_holds_a_part_of_one_bin_of_fewer_byte_for_byte(tmp_path, usual, bins):
    location = str(tmp_path / "checkpoint")
    run(range(ALL_EPOCHS), location, bins=bins)
    found, wanted = dumps(location), dumps(usual)
    assert found.keys() == wanted.keys()
    for name in wanted:
        entries = 0
        if name in ("pairs", "settled"):
            continue  # joins keep the latest time once per bin
        fewer = min(bins, 256)
        for side, many in ((found[name], bins), (wanted[name], 256)):
            united: dict[tuple[int, bytes], bytes] = {}
            for number, rows in side.items():
                united.update({(number * fewer // many, key): value for key, value in rows.items()})
            if side is found[name]:
                first, entries = united, len(united)
            else:
                assert united == first, name
        assert entries > 0, name


def counting() -> tuple[Flow, MemorySink]:
    flow, out = Flow("counting"), MemorySink()
    rows = flow.source("rows", ListSource([[{"k": k} for k in range(20)]], "k bigint"))
    rows.key_by("by_k", "k").aggregate("n", count=agg.count()).sink("out", out)
    return flow, out


@pytest.mark.parametrize("bins", [0, 3, 100, 1 << 17, -256, 2.0, True])
def test_other_numbers_than_powers_of_two_are_refused(tmp_path, bins):
    flow, _ = counting()
    location = tmp_path / "checkpoint"
    with pytest.raises(FlowError, match=rf"bins={bins!r}: give a power of two from 1 to 65536"):
        run_local(flow, bins=bins, checkpoint=str(location))
    assert not location.exists()


def test_a_restart_with_another_number_is_refused_and_one_without_continues(tmp_path):
    location = str(tmp_path / "checkpoint")
    run_local(counting()[0], bins=16, checkpoint=location)
    with pytest.raises(CheckpointError, match=r"a job with 16 bins, not with 256\. .*leave out bins=256, or use a new"):
        run_local(counting()[0], bins=256, checkpoint=location)
    flow, out = counting()
    run_local(flow, checkpoint=location)
    assert {row["count"] for row in out.rows} == {2}
    flow, out = counting()
    run_local(flow, bins=16, checkpoint=location)
    assert {row["count"] for row in out.rows} == {3}


def test_there_cannot_be_more_partitions_than_bins(tmp_path):
    with pytest.raises(FlowError, match="partitions=5: give a whole number from 1 to 4, the number of bins"):
        run_local(counting()[0], bins=4, partitions=5)
    flow, out = counting()
    run_local(flow, bins=4, partitions=4)
    assert len(out.rows) == 20


def test_the_command_line_shows_the_state_of_a_job_with_many_bins(tmp_path):
    location = str(tmp_path / "checkpoint")
    run_local(counting()[0], bins=4096, checkpoint=location)
    shown = CliRunner().invoke(app, ["state", location, "n", "7"], env={"COLUMNS": "200"})
    assert shown.exit_code == 0, shown.output
    assert "7" in shown.stdout
