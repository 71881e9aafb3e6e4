"""The log of changes in the checkpoint location.

Damage before its last entry is an error, because a lost change would bring back the function that it replaced; only
``changes="drop"``, which needs none of the changes, can continue.
"""

from __future__ import annotations

from midstream.checkpoint.change_records import ChangeRecord
from midstream.checkpoint.entry_log import EntryLog

__all__ = ["ChangeLog"]


class ChangeLog(EntryLog[ChangeRecord]):
    """Changes of one job, in the order in which they were requested. One process writes; any may read.

    >>> import tempfile
    >>> from midstream.ids import Revision
    >>> log = ChangeLog(tempfile.mkdtemp())
    >>> log.keep(ChangeRecord(log.next_number(), Revision(2), 0.0, "ann@host", "fries", (), "plan"))
    >>> [record.revision for record in log.records()]
    [2]
    """

    kind = ChangeRecord
    what = "the log of changes"
    advice = "or start the flow with changes='drop', which leaves all earlier changes out"
    loss = ", with any migration of state in it"
