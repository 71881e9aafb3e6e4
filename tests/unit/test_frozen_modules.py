"""What a worker's programs load is looked through for garbage once, and let go when it is garbage after all."""

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


def test_what_was_loaded_is_not_looked_through_again():
    settled = Settled()
    settled.after_task(Digest("a"))
    frozen = gc.get_freeze_count()
    assert frozen > 10_000
    assert len(gc.get_objects()) < frozen / 10
    later = [Loaded() for _ in range(1000)]
    settled.after_task(Digest("a"))
    assert gc.get_freeze_count() <= frozen
    assert len(later) == 1000


def test_what_an_earlier_program_had_loaded_goes_when_another_one_settles():
    settled = Settled()
    loaded = Loaded()
    gone = weakref.ref(loaded)
    settled.after_task(Digest("a"))
    del loaded
    gc.collect()
    assert gone() is not None  # frozen
    settled.after_task(Digest("b"))
    assert gone() is None


def test_what_was_forgotten_goes_with_the_next_task_of_a_program_that_has_settled_before():
    settled = Settled()
    loaded = Loaded()
    gone = weakref.ref(loaded)
    settled.after_task(Digest("a"))
    del loaded
    settled.after_task(Digest("a"))
    assert gone() is not None, "nothing was forgotten, so nobody looks"
    settled.forgotten({Digest("old")})
    settled.after_task(Digest("a"))
    assert gone() is None
    frozen = gc.get_freeze_count()
    assert frozen > 10_000, "what is left is not looked through again"
    settled.forgotten(set())
    settled.after_task(Digest("a"))
    assert gc.get_freeze_count() == frozen


def test_a_program_that_was_forgotten_settles_again():
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
