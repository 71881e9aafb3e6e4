"""Checks that executors can do their part of a job: reach its coordinator, and the folders that they share with the
driver.

A firewall, or a folder that each host has for itself, would otherwise fail the first epoch, or the commit of it. The
check comes before anything of the job is written or read. It is left out where tasks run in the driver's own process
tree, and costs one small Spark job elsewhere.

A file in a folder shows whether it is shared: in a new folder, one that is written for this and removed again, with a
name that a start ignores if it is left behind; otherwise the one that names the owner of the folder.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import posixpath
import random
import socket
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import pyarrow.fs as pafs
from pyspark import SparkContext

from midstream.checkpoint.identity import IDENTITY
from midstream.checkpoint.location import Checkpoint
from midstream.checkpoint.sink_marker import MARKER
from midstream.control.channel import Address, Client
from midstream.control.messages import WorkerId, WorkerJoined, WorkerReleased
from midstream.errors import ChannelError, CheckpointError, SetupError
from midstream.flow.model import Graph, Sink
from midstream.flow.sinks import FileSink
from midstream.runtime.spark.executor_name import executor_of_this_process
from midstream.runtime.spark.shipping import is_on_one_machine
from midstream.runtime.spark.small_job import MOST_TASKS, ask_workers
from midstream.runtime.spark.worker_python import reason_of
from midstream.storage.blobs import filesystem_of, is_local, remove_file, write_atomically

__all__ = ["PORT", "Answer", "SharedFolder", "look", "proven", "require_able", "require_executors"]

_log = logging.getLogger("midstream")

PORT = "spark.midstream.port"
"""The setting of a session with the port at which a job's coordinator listens."""

CONNECT_S = 10.0
PATIENCE_S = 60.0


@dataclass(frozen=True)
class SharedFolder:
    """A folder that executors must share with the driver. Picklable.

    ``owner`` is the name of the file that says whose it is, ``proof`` that of the file to look for, with its digest.
    """

    what: str
    location: str
    owner: str
    proof: str
    digest: str


@dataclass(frozen=True)
class Answer:
    """The problems of an executor. ``unshared`` has the reason for each folder that is not shared, by its
    description."""

    where: str
    unreached: str | None
    unshared: tuple[tuple[str, str], ...]


def require_executors(context: SparkContext, address: Address, graph: Graph, checkpoint: Checkpoint) -> None:
    """Raise :class:`SetupError` or :class:`CheckpointError` if an executor could not do its part."""
    if is_on_one_machine(context):
        return
    with contextlib.ExitStack() as proofs:
        folders = [
            proofs.enter_context(proven(what, location, owner)) for what, location, owner in _shared(graph, checkpoint)
        ]
        tasks = min(int(context.defaultParallelism), MOST_TASKS)
        try:
            answers = ask_workers(context, partial(look, address, tuple(folders)), tasks, PATIENCE_S)
        except Exception as error:  # one of Spark's many classes of errors
            raise SetupError(
                f"executors cannot be asked whether they reach the coordinator and the checkpoint: "
                f"{reason_of(str(error))} Spark's log has the whole story"
            ) from error
    if answers is None:
        _log.warning(
            "not all executors have answered within %g seconds, so it is not known whether they reach the coordinator "
            "at %s and the checkpoint %r; the job starts nevertheless",
            PATIENCE_S,
            address.endpoint,
            checkpoint.location,
        )
        return
    for found in sorted(answers, key=lambda answer: answer.where):
        require_able(found, address)


def require_able(found: Answer, address: Address) -> None:
    """Raise for the first thing that an executor cannot do."""
    if found.unreached is not None:
        raise SetupError(
            f"{found.where} cannot reach the coordinator of this job, which listens on the driver's host: "
            f"{found.unreached} Executors must be able to connect to {address.endpoint}. If a firewall is in between, "
            f"give the job a port that is open, with {PORT} when the session is made; if executors know the driver by "
            f"another address, set spark.driver.host to that and spark.driver.bindAddress to the driver's own",
            endpoint=address.endpoint,
        )
    for what, reason in found.unshared:
        raise CheckpointError(
            f"{what} is not shared: {found.where} {reason}. It must be storage that the driver and all executors "
            f"share, such as a network file system that is mounted at the same place on all hosts, or hdfs:// or s3a://"
        )


def look(address: Address, folders: Sequence[SharedFolder], _: Iterable[int]) -> Iterator[Answer]:
    """Find the problems of this executor. Runs in a Python worker."""
    where = f"executor {executor_of_this_process()} on {socket.gethostname()!r}"
    unreached = None
    name = WorkerId(socket.gethostname(), os.getpid())
    try:
        with Client(address, timeout=CONNECT_S) as client:
            client.request(WorkerJoined(name))
            client.post(WorkerReleased(name))
    except ChannelError as error:
        unreached = f"{error}."
    unshared = tuple((folder.what, reason) for folder in folders if (reason := _why_not(folder)) is not None)
    yield Answer(where, unreached, unshared)


def _why_not(folder: SharedFolder) -> str | None:
    """Why this process cannot read and write a folder, as the rest of a sentence; None if it can."""
    try:
        fs, root = filesystem_of(folder.location)
        found = _content(fs, posixpath.join(root, folder.proof))
    except Exception as error:  # of whatever classes the storage's package has
        return f"cannot read there what the driver wrote ({error})"
    if _digest(found) != folder.digest:
        return f"finds another {folder.proof} there than the driver"
    try:
        own = posixpath.join(root, _passed_over(folder.owner))
        write_atomically(fs, own, b"", durable=False)
        remove_file(fs, own)
    except Exception as error:
        return f"can read there, but not write ({error})"
    return None


def _shared(graph: Graph, checkpoint: Checkpoint) -> Iterator[tuple[str, str, str]]:
    """The folders of a job: what they are, where they are, and the file in each that says whose it is."""
    yield f"the checkpoint {checkpoint.location!r}", checkpoint.location, IDENTITY
    for op in graph.of(Sink):
        target = graph.payloads[op.name]
        if isinstance(target, FileSink):
            yield f"the folder {target.path!r} of sink {op.name!r}", target.path, MARKER


@contextlib.contextmanager
def proven(what: str, location: str, owner: str) -> Iterator[SharedFolder]:
    """A folder with a file in it that executors can look for. Afterwards the folder is as it was before."""
    fs, root = filesystem_of(location)
    # Workers have their own working directory, so a relative path must not reach them.
    location = root if is_local(fs) else location
    missing = _missing(root) if is_local(fs) else []
    proof, token = _passed_over(owner), os.urandom(16)
    try:
        with contextlib.ExitStack() as stack:
            try:
                if fs.get_file_info(posixpath.join(root, owner)).type != pafs.FileType.NotFound:
                    proof, token = owner, _content(fs, posixpath.join(root, owner))
                else:
                    if is_local(fs) and owner == IDENTITY:  # with the mode that it will have
                        os.makedirs(root, mode=0o700, exist_ok=True)
                    stack.callback(_remove, fs, posixpath.join(root, proof))
                    write_atomically(fs, posixpath.join(root, proof), token, durable=False)
            except OSError as error:
                raise CheckpointError(f"{what} cannot be used: {error}") from error
            yield SharedFolder(what, location, owner, proof, _digest(token))
    finally:
        for folder in missing:
            with contextlib.suppress(OSError):  # it is not empty, or was not made
                os.rmdir(folder)


def _missing(path: str) -> list[str]:
    """A local folder and its parents, as far as they do not exist, innermost first."""
    found = []
    while not os.path.exists(path):
        found.append(path)
        path = os.path.dirname(path)
    return found


def _passed_over(owner: str) -> str:
    """A name for a file that a start ignores if it is left behind, as it does a file that was only partly written.

    >>> _passed_over("midstream.json").endswith(".tmp")
    True
    """
    return f"{owner}.{random.getrandbits(48)}.tmp"


def _content(fs: pafs.FileSystem, path: str) -> bytes:
    with fs.open_input_stream(path) as stream:
        return bytes(stream.read())


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _remove(fs: pafs.FileSystem, path: str) -> None:
    with contextlib.suppress(OSError):
        remove_file(fs, path)
