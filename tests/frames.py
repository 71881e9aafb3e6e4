"""Frames taken apart, for tests that look at one half of them."""

from __future__ import annotations

import pyarrow as pa

from midstream.engine.frames import Header, frames_of


def headers(frames: pa.RecordBatch) -> list[Header]:
    return [header for header, _ in frames_of(frames)]


def payloads(frames: pa.RecordBatch) -> list[pa.Buffer]:
    return [payload for _, payload in frames_of(frames)]
