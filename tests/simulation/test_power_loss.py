"""Whatever a power loss leaves of a checkpoint on a local disk, the job continues from it exactly.

A run is recorded at the level of system calls, and the disk is rebuilt as a crash after any of them may leave it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from midstream.errors import MidstreamError
from tests.power_loss import AllSynced, Operation, Promised, Removed, Renamed, Synced
from tests.simulation.power_world import RECORDED, Kept, World

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    made = World(tmp_path_factory.mktemp("power"))
    made.run()
    return made


def test_the_recording_is_complete_and_covers_all_kinds_of_files(world: World) -> None:
    world.check_recorded()
    written = [operation.other for operation in world.operations if isinstance(operation, Renamed)]
    for kind in ("-delta-", "-merged-", "-snapshot-", "/epochs/", "/blobs/", "/changes/", "midstream.json"):
        assert any(kind in path for path in written), kind
    assert any(isinstance(operation, Removed) and "/state/" in operation.path for operation in world.operations)
    promises = [operation.what for operation in world.operations if isinstance(operation, Promised)]
    assert [str(each.outcome) for each in promises if isinstance(each, Kept)] == ["pending", "applied"] * 2


def test_after_a_power_loss_the_job_continues_exactly(world: World) -> None:
    ends = range(0, len(world.operations) + 1, len(world.operations) // 36)
    assert {world.crash(end, end).check() for end in ends} >= set(range(RECORDED))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_after_a_power_loss_at_any_point_the_job_continues_exactly(tmp_path: Path, seed: int) -> None:
    world = World(tmp_path, seed=seed)
    world.run()
    for end in range(len(world.operations) + 1):
        world.crash(end, 1000 * seed + end).check()


def test_a_process_killed_before_syncing_does_not_harm_the_next_one(tmp_path: Path) -> None:
    """It leaves a manifest whose name is not on disk. The next process must not remove what it supersedes."""
    first = World(tmp_path / "first")
    first.run()
    renamed = [
        index for index, each in enumerate(first.operations) if isinstance(each, Renamed) and "/epochs/" in each.path
    ]
    world = World(tmp_path / "second")
    world.run_until_killed(renamed[3] + 1)
    killed = len(world.operations)
    world.run()
    world.check_recorded()
    after = world.operations[killed:]
    swept = [killed + index for index, each in enumerate(after) if isinstance(each, Removed)]
    # Until the next process syncs the folder of manifests.
    synced = next(
        index for index, each in enumerate(after) if isinstance(each, Synced) and each.path.endswith("/epochs")
    )
    careless: list[Operation] = [each for each in world.operations if not isinstance(each, AllSynced)]
    assert len(careless) == len(world.operations) - 1
    red = 0
    for seed in range(12):
        end = random.Random(seed).randrange(swept[0] + 1, killed + synced)
        world.crash(end, seed).check()
        red += is_red(world, end - 1, seed, careless)
    assert red > 0, "syncing at the start had no effect"


# ── the tests detect missing syncs ────────────────────────────────────────────────────────────────────────────────


def is_red(world: World, end: int, seed: int, operations: list[Operation]) -> bool:
    """Whether a crash leaves something from which the job does not continue exactly."""
    try:
        world.crash(end, seed, operations).check()
    except (MidstreamError, AssertionError):
        return True
    return False


def crashes(world: World, operations: list[Operation], tries: int) -> Iterator[bool]:
    """Whether crashes at points spread over a recording are red."""
    rng = random.Random(5)
    for seed in range(tries):
        yield is_red(world, rng.randrange(len(operations) + 1), seed, operations)


def test_without_durability_most_power_losses_are_detected(tmp_path: Path) -> None:
    world = World(tmp_path, durable=False)
    world.run()
    assert not any(isinstance(operation, Synced | AllSynced) for operation in world.operations)
    assert sum(crashes(world, world.operations, 20)) >= 12


WITHOUT: dict[str, Callable[[Synced], bool]] = {
    "files": lambda synced: not synced.is_folder,
    "folders": lambda synced: synced.is_folder,
    "files of state": lambda synced: not synced.is_folder and "/state/" in synced.path,
    "folders of state": lambda synced: synced.is_folder and "/state" in synced.path,
    "manifests": lambda synced: not synced.is_folder and "/epochs/" in synced.path,
    "names of manifests": lambda synced: synced.is_folder and synced.path.endswith("/epochs"),
    "blobs": lambda synced: "/blobs" in synced.path,
    "changes": lambda synced: "/changes" in synced.path,
}


@pytest.mark.parametrize("what", WITHOUT)
def test_a_missing_sync_is_detected(world: World, what: str) -> None:
    left_out = WITHOUT[what]
    operations = [each for each in world.operations if not (isinstance(each, Synced) and left_out(each))]
    assert len(operations) < len(world.operations)
    found = crashes(world, operations, 20)
    assert [any(found), any(found)] == [True, True], "at least two of twenty"
