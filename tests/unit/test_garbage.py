"""What a worker's programs load is looked through for garbage once, and let go when it is garbage after all."""

from __future__ import annotations

import gc
import weakref

import pytest

from midstream.ids import Digest
from midstream.runtime.garbage import Settled


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
