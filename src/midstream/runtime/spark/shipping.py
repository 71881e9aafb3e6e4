"""Ships midstream itself to Python workers, so that they need only its dependencies.

Workers run what the driver runs: the shipped copy comes before any that is installed there.
:mod:`midstream.runtime.spark.worker_python` decides whether it is needed.
"""

from __future__ import annotations

import os
import tempfile
import zipfile
from pathlib import Path

from pyspark import SparkContext

from midstream.version import __version__

__all__ = ["is_on_one_machine", "package_zip", "ship"]

_shipped: set[str] = set()


def is_on_one_machine(context: SparkContext) -> bool:
    """Whether tasks run in the driver's own process tree.

    False for ``local-cluster[…]``, whose executors are processes like those of a real cluster.
    """
    master = str(context.master)
    return master.startswith("local[") or master == "local"


def ship(context: SparkContext) -> None:
    """Send the package to the Python workers of an application, once."""
    application = str(context.applicationId)
    if application in _shipped:
        return
    archive = str(package_zip(Path(tempfile.mkdtemp(prefix="midstream-"))))
    # By their path, for workers on this machine. Workers that plan a source for a streaming query run on the driver's
    # host, also on a cluster, and do not see what addPyFile sends.
    known = context.environment.get("PYTHONPATH")
    context.environment["PYTHONPATH"] = os.pathsep.join([archive, known] if known else [archive])
    if not is_on_one_machine(context):
        context.addPyFile(archive)
    _shipped.add(application)


def package_zip(folder: Path) -> Path:
    """The package's own Python files as a zip file in ``folder``."""
    root = Path(__file__).resolve().parents[2]
    path = folder / f"midstream-{__version__}.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for file in sorted(root.rglob("*.py")):
            archive.write(file, Path("midstream") / file.relative_to(root))
    return path
