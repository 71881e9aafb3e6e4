"""Ships midstream itself to executors, so that a cluster needs only its dependencies.

What the driver runs is what executors run: the shipped copy comes before any that is installed there. In local mode
driver and workers share one installation and nothing is shipped.
"""

from __future__ import annotations

import tempfile
import zipfile
from pathlib import Path

from pyspark import SparkContext

from midstream.version import __version__

_shipped: set[str] = set()


def ship(context: SparkContext) -> None:
    """Send the package to the executors of an application, once."""
    application, master = str(context.applicationId), str(context.master)
    if master.startswith("local[") or master == "local" or application in _shipped:
        return
    context.addPyFile(str(package_zip(Path(tempfile.mkdtemp(prefix="midstream-")))))
    _shipped.add(application)


def package_zip(folder: Path) -> Path:
    """The package's own Python files as a zip file in ``folder``."""
    root = Path(__file__).resolve().parent.parent
    path = folder / f"midstream-{__version__}.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for file in sorted(root.rglob("*.py")):
            archive.write(file, Path("midstream") / file.relative_to(root))
    return path
