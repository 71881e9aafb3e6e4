"""What can be done behind a key_by: operators that keep state per key."""

from __future__ import annotations

from typing import TYPE_CHECKING

from midstream.data.durations import duration
from midstream.errors import FlowError
from midstream.flow.model import Distinct
from midstream.flow.validate import check_name
from midstream.operators.rows import KeyedRows

if TYPE_CHECKING:
    from midstream.operators.stream import Stream


class KeyedOperators(KeyedRows):
    """The operators of a keyed stream that have no module of their own."""

    def distinct(
        self, name: str, *, within: str | None = None, time: str | None = None, on_error: str = "fail"
    ) -> Stream:
        """Only the first row of each key.

        :param within: forget a key when the watermark is so far behind that first row, so that state stays bounded.
        :param on_error: as in :meth:`aggregate`.
        """
        what = f"distinct {check_name(name, 'distinct')!r}"
        if within is None:
            if time is not None:
                raise FlowError(f"{what}: time={time!r} has a meaning only with within=")
            return self._flow._add(name, Distinct(self.keys), (self._port,), self.schema, on_error=on_error)
        spec = Distinct(self.keys, self._time(time, what), duration(within, f"{what}: within"))
        return self._flow._add(name, spec, (self._port,), self.schema, on_error=on_error)
