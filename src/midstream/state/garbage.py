"""Files of state that no restart needs any more. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from midstream.ids import Epoch
from midstream.state.files import epoch_and_operator
from midstream.state.lineage import Lineage

__all__ = ["garbage"]


def garbage(names: Iterable[str], kept: Iterable[Lineage], settled: Epoch) -> list[str]:
    """Those of ``names`` that are no longer needed.

    ``kept`` are the lineages of all manifests from which a restart may continue. Files that they refer to stay, and so
    do files written after the epoch ``settled``, the last epoch that cannot be run again.

    >>> garbage(["count/0000000003-0-0-0-delta-0123456789abcdef.arrow"], [], settled=Epoch(2))
    []
    >>> garbage(["count/0000000003-0-0-0-delta-0123456789abcdef.arrow"], [], settled=Epoch(3))
    ['count/0000000003-0-0-0-delta-0123456789abcdef.arrow']
    """
    needed = {entry.file.name for lineage in kept for entry in lineage.entries}
    removable = []
    for name in names:
        found = epoch_and_operator(name)
        if found is not None and found[0] <= settled and name not in needed:
            removable.append(name)
    return removable
