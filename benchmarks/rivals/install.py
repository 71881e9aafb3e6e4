"""Install the engines that benchmarks compare with, each into an environment of its own: what ``make rivals`` does.

PyFlink does not run on the newest Pythons, and needs older versions of packages that midstream uses; so it gets an
environment of its own, with a Python that it supports, in a folder that ``make clean`` removes.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from benchmarks.rivals.flink import ENVIRONMENT, ROOT, Missing, find

__all__ = ["PYFLINK", "SUPPORTED", "candidates", "main", "version_of"]

PYFLINK = "apache-flink==2.3.0"
SUPPORTED = ((3, 11), (3, 12), (3, 10), (3, 9))
"""The versions of Python that this version of it runs on; with the first one it was tried."""
VERSION = "import ensurepip, venv, sys; print(*sys.version_info[:2])"


def candidates() -> Iterator[str]:
    """Commands that may be a Python it runs on: those on PATH, pyenv's, and the one at work."""
    root = Path(os.environ.get("PYENV_ROOT", "~/.pyenv")).expanduser() / "versions"
    for major, minor in SUPPORTED:
        if (found := shutil.which(f"python{major}.{minor}")) is not None:
            yield found
        yield from (str(path) for path in sorted(root.glob(f"{major}.{minor}.*/bin/python")))
    yield sys.executable


def version_of(command: str) -> tuple[int, ...] | None:
    """The version of a Python that can make environments; None if it is none. Some commands only print an error."""
    try:
        asked = subprocess.run([command, "-c", VERSION], capture_output=True, text=True, check=False)
    except OSError:
        return None
    return tuple(map(int, asked.stdout.split())) if asked.returncode == 0 else None


def main() -> int:
    """Install what is missing; the exit code is 1 if that cannot be."""
    try:
        print(f"PyFlink is there: {Path(find()).relative_to(ROOT)}")
        return 0
    except Missing:
        pass
    usable = [command for command in candidates() if version_of(command) in SUPPORTED]
    if not usable:
        allowed = ", ".join(f"{major}.{minor}" for major, minor in SUPPORTED)
        print(f"{PYFLINK} needs a Python {allowed}; there is none on PATH or among pyenv's", file=sys.stderr)
        return 1
    print(
        f"Installing {PYFLINK} into {ENVIRONMENT.relative_to(ROOT)} (about 850 MB; this takes some minutes)", flush=True
    )
    python = str(ENVIRONMENT / "bin" / "python")
    subprocess.run([usable[0], "-m", "venv", "--clear", str(ENVIRONMENT)], check=True)
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", PYFLINK]
    if subprocess.run(pip, check=False).returncode:
        shutil.rmtree(ENVIRONMENT)
        print("The installation failed; pip says why above. Benchmarks leave PyFlink out", file=sys.stderr)
        return 1
    find()
    return 0


if __name__ == "__main__":
    sys.exit(main())
