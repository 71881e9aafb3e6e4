"""What a job says in the topic of epochs of a :class:`~midstream.KafkaSink`, and how readers understand it."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from midstream.errors import FlowError
from midstream.ids import Epoch

__all__ = ["EpochNote", "runs_that_count"]


class EpochNote(msgspec.Struct, frozen=True, omit_defaults=True):
    """One record in the topic of epochs: a run of an epoch begins, or the newest committed epoch is this one."""

    job: str
    sink: str
    epoch: Epoch
    run: str = ""
    """Of a run that begins; empty if the epoch is committed."""

    @property
    def key(self) -> bytes:
        """The key of the record."""
        return f"{self.job}/{self.sink}".encode()


def runs_that_count(notes: Iterable[bytes | str]) -> dict[tuple[str, str, int], str]:
    """Which run of each committed epoch counts, from the values of all records of an epochs' topic, in their order.

    The result has the run by job, sink and epoch. A record of the sink's topic counts if its headers
    ``midstream-job``, ``-sink``, ``-epoch`` and ``-run`` are in it; of several with one ``midstream-position`` as well
    it counts once.

    >>> runs_that_count(
    ...     [
    ...         '{"job": "j", "sink": "out", "epoch": 0, "run": "a"}',
    ...         '{"job": "j", "sink": "out", "epoch": 0, "run": "b"}',
    ...         '{"job": "j", "sink": "out", "epoch": 1, "run": "c"}',
    ...     ]
    ... )
    {('j', 'out', 0): 'b'}
    """
    runs: dict[tuple[str, str], dict[int, str]] = {}
    newest: dict[tuple[str, str], int] = {}
    for text in notes:
        try:
            note = msgspec.json.decode(text, type=EpochNote)
        except msgspec.MsgspecError as error:
            raise FlowError(f"{text!r:.100} is no record of a topic of epochs: {error}") from error
        place = note.job, note.sink
        # A run begins when all earlier epochs are committed. What is known of later ones was taken back by a rewind.
        newest[place] = note.epoch - 1 if note.run else note.epoch
        known = runs.get(place, {})
        runs[place] = {epoch: run for epoch, run in known.items() if epoch <= newest[place]}
        if note.run:
            runs[place][note.epoch] = note.run
    return {
        (job, sink, epoch): run
        for (job, sink), of_sink in runs.items()
        for epoch, run in sorted(of_sink.items())
        if epoch <= newest[job, sink]
    }
