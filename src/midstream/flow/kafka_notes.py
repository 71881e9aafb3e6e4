"""What a job writes to the epochs topic of a :class:`~midstream.KafkaSink`, and how readers interpret it."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from midstream.errors import FlowError
from midstream.ids import Epoch

__all__ = ["EpochNote", "runs_that_count"]


class EpochNote(msgspec.Struct, frozen=True, omit_defaults=True):
    """One record in the topic of epochs: a run of an epoch begins, or an epoch is the newest that is committed.

    Either voids whatever is known of later epochs; the first also voids what is known of this epoch.
    """

    job: str
    sink: str
    epoch: Epoch
    run: str = ""
    """The name of a run that begins; empty if the epoch is committed."""

    @property
    def key(self) -> bytes:
        """The key of the record."""
        return f"{self.job}/{self.sink}".encode()


def runs_that_count(notes: Iterable[bytes | str]) -> dict[tuple[str, str, int], str]:
    """The run of each committed epoch that counts, from the values of all records of an epochs' topic, in their order.

    The result has the run by job, sink and epoch. A record of the sink's topic counts if its headers
    ``midstream-job``, ``-sink``, ``-epoch`` and ``-run`` are in it; of several with one ``midstream-position`` as well
    it counts once.

    >>> runs_that_count(
    ...     [
    ...         '{"job": "j", "sink": "out", "epoch": 0, "run": "a"}',
    ...         '{"job": "j", "sink": "out", "epoch": 0, "run": "b"}',
    ...         '{"job": "j", "sink": "out", "epoch": 0}',
    ...         '{"job": "j", "sink": "out", "epoch": 1, "run": "c"}',
    ...     ]
    ... )
    {('j', 'out', 0): 'b'}
    """
    begun: dict[tuple[str, str], dict[int, str]] = {}
    committed: set[tuple[str, str, int]] = set()
    for text in notes:
        try:
            note = msgspec.json.decode(text, type=EpochNote)
        except msgspec.MsgspecError as error:
            raise FlowError(f"{text!r:.100} is not a record of a topic of epochs: {error}") from error
        place = note.job, note.sink
        runs = begun[place] = {e: run for e, run in begun.get(place, {}).items() if e < note.epoch + (not note.run)}
        if note.run:
            runs[note.epoch] = note.run
            committed.discard((*place, note.epoch))
        else:
            committed.add((*place, note.epoch))
    return {
        (*place, epoch): run
        for place, runs in begun.items()
        for epoch, run in sorted(runs.items())
        if (*place, epoch) in committed
    }
