"""No blob is removed that is, or is about to be, referred to; and every other blob is removed eventually."""

from __future__ import annotations

import threading

from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from midstream.ids import Digest
from midstream.storage.holds import Holds, Mark
from tests.examples import examples

DIGESTS = [Digest(letter) for letter in "abcdef"]


class Store(RuleBasedStateMachine):
    """A store, preparations that may end in records, and a sweeper that looks now and removes later."""

    preparations = Bundle("preparations")

    def __init__(self) -> None:
        super().__init__()
        self.holds = Holds()
        self.stored: set[Digest] = set()
        self.recorded: set[Digest] = set()
        self.prepared: dict[int, set[Digest]] = {}
        self.scopes: dict[int, object] = {}
        self.looked: tuple[Mark, frozenset[Digest]] = (self.holds.mark(), frozenset())
        self.count = 0

    @rule(target=preparations)
    def begin(self) -> int:
        self.count += 1
        scope = self.holds.preparing()
        scope.__enter__()
        self.scopes[self.count], self.prepared[self.count] = scope, set()
        return self.count

    @rule(preparation=preparations, digest=st.sampled_from(DIGESTS))
    def put(self, preparation: int, digest: Digest) -> None:
        self.holds.touch(digest)
        self.stored.add(digest)
        self.prepared[preparation].add(digest)

    @rule(preparation=consumes(preparations), is_taken=st.booleans())
    def end(self, preparation: int, is_taken: bool) -> None:
        digests = self.prepared.pop(preparation)
        if is_taken:
            self.recorded |= digests
        self.scopes.pop(preparation).__exit__(None, None, None)  # type: ignore[attr-defined]

    @rule(digest=st.sampled_from(DIGESTS))
    def forget_record(self, digest: Digest) -> None:
        self.recorded.discard(digest)

    @rule()
    def look(self) -> None:
        self.looked = (self.holds.mark(), frozenset(self.recorded))

    @rule(digest=st.sampled_from(DIGESTS))
    def remove(self, digest: Digest) -> None:
        mark, live = self.looked
        if digest in self.stored - live:
            self.holds.remove(digest, mark, lambda: self.stored.remove(digest))

    @rule()
    def forget(self) -> None:
        self.holds.forget_before(self.looked[0])

    @invariant()
    def nothing_is_missing(self) -> None:
        assert self.recorded <= self.stored
        for digests in self.prepared.values():
            assert digests <= self.stored

    def teardown(self) -> None:
        for scope in self.scopes.values():
            scope.__exit__(None, None, None)  # type: ignore[attr-defined]
        self.look()
        for digest in DIGESTS:
            self.remove(digest)
        assert self.stored == self.recorded, "unreferenced blobs are removed once nothing is being prepared"


Store.TestCase.settings = examples(100, stateful_step_count=30)
TestStore = Store.TestCase


def test_storing_a_blob_during_its_removal_waits_until_it_is_gone():
    holds, events = Holds(), list[str]()
    is_removing, may_go_on = threading.Event(), threading.Event()

    def remove() -> None:
        is_removing.set()
        may_go_on.wait(60)
        events.append("removed")

    def store() -> None:
        is_removing.wait(60)
        threading.Timer(0.05, may_go_on.set).start()
        holds.touch(Digest("a"))
        events.append("stored")

    thread = threading.Thread(target=store)
    thread.start()
    assert holds.remove(Digest("a"), holds.mark(), remove)
    thread.join()
    assert events == ["removed", "stored"]
