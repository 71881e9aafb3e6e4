"""The command ``midstream``: draw, run and change flows, inspect state, and check the installation."""

from __future__ import annotations

from midstream.cli.app import main

__all__ = ["main"]
