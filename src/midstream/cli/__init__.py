"""The command ``midstream``: draw a flow, run a flow, look whether everything is there that Spark needs."""

from __future__ import annotations

from midstream.cli.app import main

__all__ = ["main"]
