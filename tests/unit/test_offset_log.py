"""Spark's log on a local disk: what is synced of it before an epoch counts."""

from __future__ import annotations

from pathlib import Path

import pytest

from midstream.ids import Epoch
from midstream.runtime.spark.offset_log import OffsetLog
from midstream.storage import disk


def put(log: Path, name: str) -> str:
    path = log / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("v1\n{}")
    return str(path)


def test_an_epoch_counts_when_its_offsets_and_what_sources_remember_are_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each file once. An offset of a file source is the number of an entry, without which nobody knows its files."""
    synced: list[str] = []
    sync = disk._sync_path

    def noted(path: str) -> None:
        synced.append(path)
        sync(path)

    monkeypatch.setattr(disk, "_sync_path", noted)
    left = put(tmp_path, "sources/1/0")  # of a driver that died before it could sync
    log = OffsetLog(f"file://{tmp_path}")
    new = [left, *(put(tmp_path, name) for name in ("offsets/0", "sources/0/0", "sources/1/1"))]
    put(tmp_path, "sources/0/.1.tmp")
    log.sync(Epoch(0))
    assert sorted(synced) == sorted(new)
    synced.clear()
    new = [put(tmp_path, name) for name in ("commits/0", "offsets/1", "sources/1/2.compact")]
    (tmp_path / "sources/1/0").unlink()  # Spark removes what it has compacted
    log.sync(Epoch(1))
    assert sorted(synced) == sorted(new)
    synced.clear()
    new = [put(tmp_path, name) for name in ("commits/1", "offsets/2")]
    log.sync(Epoch(2))
    assert sorted(synced) == sorted(new)
