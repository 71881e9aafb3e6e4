"""``python -m midstream``: the same as the command ``midstream``."""

from __future__ import annotations

from midstream.cli import main

if __name__ == "__main__":
    main()
