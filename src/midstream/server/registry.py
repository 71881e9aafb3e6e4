"""Which jobs are served on this machine: one file for each, in a folder that only its user can read.

The file holds the job's token, so whoever can read it can change the job. It is written with mode 0600 into a folder of
mode 0700, and removed when the job ends; what a killed process leaves behind is removed by whoever looks next.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from pathlib import Path

import msgspec

from midstream.errors import SetupError

__all__ = ["ServedEntry", "enter", "served_jobs"]


class ServedEntry(msgspec.Struct, frozen=True):
    """A served job: where it is and how it is reached."""

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
    """Where entries may lie; new ones go into the first.

    A job that was started by a service has no XDG_RUNTIME_DIR, while its user at a terminal has one: so all are read.
    """
    if home := os.environ.get("MIDSTREAM_HOME"):
        return (Path(home) / "jobs",)
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    at_home = Path.home() / ".midstream" / "jobs"
    return (Path(runtime) / "midstream", at_home) if runtime and Path(runtime).is_dir() else (at_home,)


def enter(entry: ServedEntry) -> Path:
    """Write an entry; gives its file."""
    folder = folders()[0]
    path = folder / f"{entry.job}.{entry.pid}.json"
    try:
        _own(folder)
        draft = folder / f".{path.name}"
        draft.unlink(missing_ok=True)
        # O_EXCL: the file is new, so nobody has it open; the mode counts from its first moment.
        with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(msgspec.json.encode(entry))
        draft.replace(path)
    except OSError as error:
        raise SetupError(
            f"the job cannot be entered into {str(folder)!r} ({error}); let MIDSTREAM_HOME name a folder of your own"
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
            continue  # gone meanwhile, or not one of ours
        if entry.host != socket.gethostname():
            continue  # a home folder may be shared between machines; of others' processes we know nothing
        if _is_alive(entry.pid):
            found.append(entry)
        else:
            with contextlib.suppress(OSError):
                path.unlink()
    return found


def _own(folder: Path) -> None:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not _is_ours(folder):
        raise PermissionError("it belongs to another user")
    if stat.S_IMODE(folder.stat().st_mode) & 0o077:
        folder.chmod(0o700)


def _is_ours(folder: Path) -> bool:
    """What others own could lead our commands, and the functions they carry, to others' servers."""
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
