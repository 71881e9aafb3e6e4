"""The version of midstream, kept in code.

Package metadata does not travel when midstream is shipped to executors as a zip, so the number cannot be read from
there; the build reads it from here instead.
"""

from __future__ import annotations

__all__ = ["__version__"]

__version__ = "0.1.0"
