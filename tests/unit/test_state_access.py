"""How a worker reaches state, and lets go of it when it has mapped too much."""

from __future__ import annotations

from pathlib import Path

import pytest

from midstream.ids import BinId, Epoch, PartitionId, Run
from midstream.state import access
from midstream.state.access import StateAccess, mapped_bytes
from midstream.state.base import Base
from midstream.state.files import Author
from midstream.state.lineage import Lineage


def test_bases_are_let_go_only_when_too_much_is_mapped_and_nothing_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = StateAccess("job", str(tmp_path / "files"), str(tmp_path / "local"))
    with state.open(Lineage.start("count"), [BinId(7)]) as task:
        task.put_many([b"\x07\x00ann"], [b"1"])
        delta = task.write_delta(Author("count", Epoch(0), Run(0), PartitionId(0), attempt=0))
    assert delta is not None
    lineage = Lineage.start("count").after(Epoch(0), [delta])

    monkeypatch.setattr(access, "MAPPED_LIMIT", mapped_bytes() + (1 << 40))
    state.trim()
    assert [folder for folder in Base._shared if folder.startswith(state.local)]

    monkeypatch.setattr(access, "MAPPED_LIMIT", -1)
    state.trim()
    assert [folder for folder in Base._shared if folder.startswith(state.local)] == []
    with state.open(lineage, [BinId(7)]) as task:
        assert task.get_many([b"\x07\x00ann"]) == [b"1"]
    state.close()


def test_the_system_tells_how_much_is_mapped() -> None:
    assert mapped_bytes() >= 0
