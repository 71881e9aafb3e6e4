"""The registry of jobs served on this machine: one file per job, in a folder that only its user can read.

The file contains the job's token, so anyone who can read it can change the job. It is written with mode 0600 into a
folder with mode 0700, and removed when the job ends. The file of a killed process is removed by the next reader.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from pathlib import Path

import msgspec

from midstream.errors import SetupError

__all__ = ["ServedEntry", "register", "served_jobs"]


class ServedEntry(msgspec.Struct, frozen=True):
    """A served job: its identity, and how to reach it."""

    pid: int
    host: str
    url: str
    token: str
    job: str
    name: str
    checkpoint: str
    started_at: float

    def __repr__(self) -> str:
        """Without the token, which must not get into logs."""
        return f"Entry({self.name!r}, job={self.job!r}, pid={self.pid}, url={self.url!r})"


def folders() -> tuple[Path, ...]:
    """Folders that may contain entries; new entries go into the first.

    A job started by a service has no XDG_RUNTIME_DIR, while its user at a terminal has one; so all folders are read.
    """
    if home := os.environ.get("MIDSTREAM_HOME"):
        return (Path(home) / "jobs",)
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    at_home = Path.home() / ".midstream" / "jobs"
    return (Path(runtime) / "midstream", at_home) if runtime and Path(runtime).is_dir() else (at_home,)


def register(entry: ServedEntry) -> Path:
    """Write an entry; return its file."""
    folder = folders()[0]
    path = folder / f"{entry.job}.{entry.pid}.json"
    try:
        _make_private(folder)
        draft = folder / f".{path.name}"
        draft.unlink(missing_ok=True)
        # O_EXCL: the file is new, so nobody has it open, and it has the right mode from the start.
        with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(msgspec.json.encode(entry))
        draft.replace(path)
    except OSError as error:
        raise SetupError(
            f"the job cannot be registered in {str(folder)!r} ({error}); set MIDSTREAM_HOME to a folder of your own"
        ) from error
    return path


def served_jobs() -> list[ServedEntry]:
    """All jobs of this user that are served on this machine, oldest first. Entries of dead processes are removed."""
    found = [entry for folder in folders() if _is_ours(folder) for entry in _entries(folder)]
    return sorted(found, key=lambda entry: (entry.started_at, entry.job))


def _entries(folder: Path) -> list[ServedEntry]:
    found = []
    for path in folder.glob("[!.]*.json"):
        try:
            entry = msgspec.json.decode(path.read_bytes(), type=ServedEntry)
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
            continue  # removed in the meantime, or not one of ours
        if entry.host != socket.gethostname():
            continue  # a shared home folder may have entries of other machines, whose processes we cannot see
        if _is_alive(entry.pid):
            found.append(entry)
        else:
            with contextlib.suppress(OSError):
                path.unlink()
    return found


def _make_private(folder: Path) -> None:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not _is_ours(folder):
        raise PermissionError("it belongs to another user")
    if stat.S_IMODE(folder.stat().st_mode) & 0o077:
        folder.chmod(0o700)


def _is_ours(folder: Path) -> bool:
    """Whether this user owns the folder. Another owner could direct our commands, and functions, to another server."""
    try:
        return folder.stat().st_uid == os.geteuid()
    except OSError:
        return False


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True
