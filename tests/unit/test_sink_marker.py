"""Which folders a file sink may write to, before anything is written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from midstream import FileSink, Flow, ListSource
from midstream.checkpoint.sink_marker import MARKER
from midstream.errors import CheckpointError, FlowError
from midstream.testing import run_local


def flow_to(*sinks: FileSink) -> Flow:
    flow = Flow("numbers")
    rows = flow.source("in", ListSource([[{"n": 1, "k": "a"}], [{"n": 2, "k": "b"}]], "n int, k string"))
    for number, sink in enumerate(sinks):
        rows.sink(f"out{number}", sink)
    return flow


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def refused(
    folder: Path, says: str, *sinks: FileSink, checkpoint: str | None = None, error: Any = CheckpointError
) -> bool:
    """Whether a flow is refused with these words, and nothing is written or removed."""
    before = contents(folder)
    with pytest.raises(error, match=says):
        run_local(flow_to(*sinks), checkpoint=None if checkpoint is None else str(folder / checkpoint))
    return contents(folder) == before


@pytest.mark.parametrize(
    ("other", "says"),
    [
        (
            {"format": "csv"},
            r"holds parquet files in no folders, the sink writes csv files in no.*Give the sink",
        ),
        ({"partition_by": "k"}, "holds parquet files in no folders, the sink writes parquet files in folders by k;"),
    ],
)
def test_a_folder_in_another_layout_is_refused(tmp_path, other, says):
    run_local(flow_to(FileSink(tmp_path / "out")), checkpoint=str(tmp_path / "c"))
    assert refused(tmp_path, says, FileSink(tmp_path / "out", **other), checkpoint="c")
    again = run_local(flow_to(FileSink(tmp_path / "out", compression="zstd")), checkpoint=str(tmp_path / "c"))
    assert len(again.progress) == 2, "compression is no matter of layout"


def test_a_folder_of_an_older_midstream_is_refused(tmp_path):
    run_local(flow_to(FileSink(tmp_path / "out")), checkpoint=str(tmp_path / "c"))
    marker = tmp_path / "out" / MARKER
    newer = marker.read_text()
    older = newer.replace('"file_format":"parquet"', '"file_format":""')
    assert older != newer
    marker.write_text(older)
    says = r"holds a folder epoch=N for each epoch, as an older midstream wrote them, the sink.*stays as it is"
    assert refused(tmp_path, says, FileSink(tmp_path / "out"), checkpoint="c")


def test_the_local_runtime_refuses_what_spark_refuses(tmp_path):
    run_local(flow_to(FileSink(tmp_path / "taken")), checkpoint=str(tmp_path / "c"))
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.png").write_bytes(b"meow")
    (tmp_path / "file").write_text("I am a file")
    assert refused(
        tmp_path, r"holds the output of sink 'out0' of flow 'numbers' \(job \w{8}\)", FileSink(tmp_path / "taken")
    )
    assert refused(tmp_path, r"holds other data \(cat\.png\)", FileSink(tmp_path / "photos"))
    assert refused(tmp_path, "is a file; a FileSink needs a folder", FileSink(tmp_path / "file"))
    both = FileSink(tmp_path / "free"), FileSink(f"{tmp_path}/x/../free")
    assert refused(tmp_path, "'out0' and 'out1' both write to", *both, error=FlowError)
