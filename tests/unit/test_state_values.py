"""Values of state: encoding, decoding, and the errors of both."""

from __future__ import annotations

import sys
import threading
import types

import numpy as np
import pytest

from midstream.errors import StateError
from midstream.ids import Revision
from midstream.state.values import MISSING, ObjectCodec, PackedCodec, Stored

OBJECTS = ObjectCodec("process 'count'", show_key=lambda key: key.decode())
STRUCT = np.dtype([("n", "<i8"), ("sum", "<f8")])
PACKED = PackedCodec(STRUCT, "aggregate 'totals'")


@pytest.mark.parametrize("value", [None, 0, "ann", {"n": [1, (2, b"x")]}, {1, 2}, 1.5])
@pytest.mark.parametrize("revision", [0, 1, 127, 128, 300, 2**40])
def test_an_object_is_decoded_with_the_revision_that_wrote_it(value, revision):
    data = OBJECTS.encode(value, Revision(revision), b"k")
    assert OBJECTS.decode(data, b"k") == Stored(value, Revision(revision))


def test_missing_values_stay_missing_among_many():
    data = OBJECTS.encode_many([1, None], Revision(5), [b"a", b"b"])
    found = OBJECTS.decode_many([data[0], None, data[1]], [b"a", b"x", b"b"])
    assert found == [Stored(1, Revision(5)), MISSING, Stored(None, Revision(5))]
    assert not MISSING
    assert repr(MISSING) == "MISSING"


def test_a_value_that_cannot_be_pickled_is_named_with_its_key():
    with pytest.raises(
        StateError, match=r"process 'count': the state of key bob is a lock that cannot be pickled"
    ) as caught:
        OBJECTS.encode_many([1, threading.Lock()], Revision(0), [b"ann", b"bob"])
    assert caught.value.key == b"bob"


def test_a_class_of_a_script_is_pickled_with_its_value(monkeypatch):
    script = types.ModuleType("some_script")
    exec("class Counter:\n    def __init__(self): self.n = 7", script.__dict__)
    monkeypatch.setitem(sys.modules, "some_script", script)
    counter = script.Counter()
    monkeypatch.delitem(sys.modules, "some_script")  # a worker has the class, but no such module
    assert OBJECTS.decode(OBJECTS.encode(counter, Revision(0), b"k"), b"k").value.n == 7


def test_a_class_that_no_longer_exists_is_named_with_its_key(monkeypatch):
    module = types.ModuleType("old_module")
    exec("class Counter: pass", module.__dict__)
    monkeypatch.setitem(sys.modules, "old_module", module)
    data = OBJECTS.encode(module.Counter(), Revision(0), b"ann")
    del module.Counter
    with pytest.raises(StateError, match=r"key ann needs a class that no longer exists.*Counter"):
        OBJECTS.decode(data, b"ann")
    monkeypatch.delitem(sys.modules, "old_module")
    with pytest.raises(StateError, match="No module named 'old_module'"):
        OBJECTS.decode_many([data], [b"ann"])


def test_bytes_that_are_not_a_pickle_are_an_error():
    with pytest.raises(StateError, match="the state of key ann cannot be read back: UnpicklingError"):
        OBJECTS.decode(b"\x00nonsense", b"ann")


def test_structs_are_decoded_as_one_writable_array():
    structs = np.array([(1, 0.5), (-2, 1e300)], STRUCT)
    data = PACKED.split(structs)
    assert [len(one) for one in data] == [16, 16]
    joined, known = PACKED.join([data[1], None, data[0]])
    assert joined.tolist() == [(-2, 1e300), (0, 0.0), (1, 0.5)]
    assert known.tolist() == [True, False, True]
    joined["n"] += 1
    assert PACKED.split(joined[::-1])[0] == PACKED.split(np.array([(2, 0.5)], STRUCT))[0]


def test_no_structs_decode_to_an_empty_array():
    joined, known = PACKED.join([])
    assert (len(joined), len(known), PACKED.split(joined)) == (0, 0, [])


@pytest.mark.parametrize("sizes", [(8,), (24, 8), (16, 17)])
def test_structs_of_another_size_are_an_error(sizes):
    with pytest.raises(StateError, match="aggregate 'totals': the stored structs do not have the 16 bytes"):
        PACKED.join([bytes(size) for size in sizes])


def test_a_struct_cannot_hold_objects():
    with pytest.raises(StateError, match="cannot hold Python objects"):
        PackedCodec(np.dtype(object), "aggregate 'totals'")
