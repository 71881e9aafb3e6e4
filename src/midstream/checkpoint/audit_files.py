"""Audit histories in the checkpoint location: written by tasks, valid once their epoch is committed.

They are for tests, so they are not synced to disk: a restart does not need them.
"""

from __future__ import annotations

import posixpath

import pyarrow as pa
import pyarrow.fs as pafs

from midstream.data.ddl import closest
from midstream.engine.audit_recorder import HISTORY
from midstream.errors import CheckpointError, FlowError
from midstream.flow.model import Graph, Source
from midstream.ids import Epoch
from midstream.storage.blobs import filesystem_of, write_atomically
from midstream.storage.documents import FORMAT, read_document, require_format, write_document

__all__ = ["check_audit", "keep_index", "read_history", "write_history"]


def check_audit(graph: Graph, column: str | None) -> None:
    """Refuse a column that no source has."""
    names = [name for op in graph.of(Source) for name in op.schema.names]
    if column is not None and column not in names:
        near = closest(column, names)
        raise FlowError(
            f"audit={column!r}: no source of flow {graph.name!r} has this column"
            + (f"; did you mean {near!r}?" if near else "")
            + f" It must identify the rows of a source; the columns are {', '.join(dict.fromkeys(names))}"
        )


def write_history(location: str, name: str, history: pa.Table) -> None:
    """Write the history that one task recorded."""
    out = pa.BufferOutputStream()
    schema = HISTORY.with_metadata({"format": str(FORMAT)})
    with pa.ipc.new_file(out, schema) as writer:
        writer.write_table(history.cast(schema))
    fs, root = filesystem_of(location)
    write_atomically(fs, posixpath.join(root, name), out.getvalue(), durable=False)


def keep_index(location: str, epoch: Epoch, names: tuple[str, ...]) -> None:
    """Write the list of tasks whose results count; other attempts have recorded histories, too."""
    fs, root = filesystem_of(location)
    write_atomically(fs, posixpath.join(root, f"{epoch:010d}.json"), write_document({"tasks": names}), durable=False)


def read_history(location: str) -> pa.Table:
    """The history of all committed epochs: ``row``, ``operator``, ``revision``."""
    fs, root = filesystem_of(location)
    found = fs.get_file_info(pafs.FileSelector(root, allow_not_found=True))
    indexes = sorted(info.path for info in found if info.path.endswith(".json"))
    if not indexes:
        raise CheckpointError(
            f"there is no history in {location!r}: call start() or run_local() with audit=, the name of a column that "
            f"identifies the rows of the source"
        )
    tables = [HISTORY.empty_table()]
    for index in indexes:
        with fs.open_input_stream(index) as stream:
            names = read_document(stream.read(), f"the audit's {posixpath.basename(index)}")["tasks"]
        for name in names:
            with fs.open_input_file(posixpath.join(root, name)) as file:
                table = pa.ipc.open_file(file).read_all()
            written = (table.schema.metadata or {}).get(b"format", b"")
            require_format(int(written) if written.isdigit() else None, f"the audit's {name}")
            tables.append(table.replace_schema_metadata())
    return pa.concat_tables(tables)
