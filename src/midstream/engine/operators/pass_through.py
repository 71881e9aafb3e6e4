"""Operators that let rows pass as they are: sources and transforms (where rows enter), unions, and key_by.

With ``on_error="branch"``, sources and key_bys let those rows pass that have a usable time or key.

What a key_by means happens on its wires, which send each row to the partition that owns its key.
"""

from __future__ import annotations

from collections.abc import Mapping

import pyarrow as pa

from midstream.engine.bad_rows import Aside, Screen
from midstream.engine.operators.base import ONLY, OperatorStep
from midstream.flow.model import KeyBy, OnError, Operator, Source

__all__ = ["pass_on", "passing_step"]


def pass_on(batch: pa.RecordBatch) -> Mapping[str, pa.RecordBatch]:
    """Rows in, the same rows out."""
    return {ONLY: batch}


def passing_step(operator: Operator) -> OperatorStep:
    """The step of an operator that lets rows pass."""
    if operator.on_error is OnError.FAIL:
        return pass_on
    spec = operator.spec
    screen = Screen(
        Aside(operator),
        keys=spec.columns if isinstance(spec, KeyBy) else (),
        times=(spec.event_time,) if isinstance(spec, Source) and spec.event_time is not None else (),
    )

    def step(batch: pa.RecordBatch) -> Mapping[str, pa.RecordBatch]:
        good, aside = screen(batch)
        return {ONLY: good, **aside}

    return step
