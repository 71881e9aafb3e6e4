"""A real disk that is small, so that it really fills, and rows that fill it."""

from __future__ import annotations

import contextlib
import json
import random
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.dataset as ds
import pytest


@contextlib.contextmanager
def small_disk(folder: Path, *, megabytes: int) -> Iterator[Path]:
    """A file system of its own in ``folder``; skips the test where such may not be mounted."""
    folder.mkdir(parents=True, exist_ok=True)
    try:
        _run("mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "midstream-test", str(folder))
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"a small file system cannot be mounted here, which takes root and Linux: {error}")
    try:
        yield folder
    finally:
        _run("umount", "--lazy", str(folder))


def resize(folder: Path, *, megabytes: int) -> None:
    """Give a small disk another size."""
    _run("mount", "-o", f"remount,size={megabytes}m", str(folder))


def rows_of_epochs(*, small: int, large: int) -> list[list[dict[str, Any]]]:
    """Four epochs of rows of 1 kB that no compression makes much smaller; the third one is large."""
    rng, numbers = random.Random(0), iter(range(10_000_000))
    return [
        [{"n": (n := next(numbers)), "k": n % 5, "text": rng.randbytes(500).hex()} for _ in range(count)]
        for count in (small, small, large, small)
    ]


def seen(folder: Path, format: str = "parquet") -> list[tuple[int, int]]:
    """The epoch and the number of each row that a plain reader of a folder sees."""
    if format == "json":  # Arrow's own reader of JSON can block forever where it has few threads
        rows = [json.loads(line) for file in folder.glob("epoch-*.json") for line in file.read_text().splitlines()]
    else:
        rows = ds.dataset(folder, partitioning="hive", format=format).to_table(columns=["n", "epoch"]).to_pylist()
    return sorted((row["epoch"], row["n"]) for row in rows)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)
