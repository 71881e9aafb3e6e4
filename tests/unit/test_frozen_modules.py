"""Objects loaded for a worker's programs are scanned for garbage once, and collected when they are dropped."""

from __future__ import annotations

import gc
import weakref

import pytest

from midstream.ids import Digest
from midstream.runtime.spark.frozen_modules import Settled


class Loaded:
    """Something that refers to itself, as the globals of a function do."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture(autouse=True)
def thawed():
    yield
    gc.unfreeze()


def test_loaded_objects_are_not_scanned_again():
    settled = Settled()
    settled.after_task(Digest("a"))
    frozen = gc.get_freeze_count()
    assert frozen > 10_000
    assert len(gc.get_objects()) < frozen / 10
    later = [Loaded() for _ in range(1000)]
    settled.after_task(Digest("a"))
    assert gc.get_freeze_count() <= frozen
    assert len(later) == 1000


def test_objects_of_an_earlier_program_are_collected_when_another_one_settles():
    settled = Settled()
    loaded = Loaded()
    gone = weakref.ref(loaded)
    settled.after_task(Digest("a"))
    del loaded
    gc.collect()
    assert gone() is not None  # frozen
    settled.after_task(Digest("b"))
    assert gone() is None


def test_dropped_objects_are_collected_after_the_next_task_of_a_settled_program():
    settled = Settled()
    loaded = Loaded()
    gone = weakref.ref(loaded)
    settled.after_task(Digest("a"))
    del loaded
    settled.after_task(Digest("a"))
    assert gone() is not None, "nothing was dropped, so nothing is scanned"
    settled.forgotten({Digest("old")})
    settled.after_task(Digest("a"))
    assert gone() is None
    frozen = gc.get_freeze_count()
    assert frozen > 10_000, "the rest is not scanned again"
    settled.forgotten(set())
    settled.after_task(Digest("a"))
    assert gc.get_freeze_count() == frozen


def test_a_dropped_program_settles_again():
    settled = Settled()
    settled.after_task(Digest("a"))
    settled.forgotten({Digest("a")})
    settled.after_task(Digest("b"))
    loaded = Loaded()
    gone = weakref.ref(loaded)
    gc.freeze()
    del loaded
    settled.after_task(Digest("b"))
    assert gone() is not None
    settled.after_task(Digest("a"))
    assert gone() is None
