"""Fetches the jars of Kafka's broker and of Spark's connector for it: ``python -m examples.kafka.jars``.

``jars.lock`` has their versions and digests. They come from wherever Ivy, which is part of Spark, finds artifacts:
Maven Central, unless ``MIDSTREAM_IVY_SETTINGS`` names a settings file of Ivy's. They are kept in ``MIDSTREAM_JARS``, by
default in the user's cache folder, and a jar is used only if its digest is right.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import quoteattr

import pyspark

LOCK = Path(__file__).with_name("jars.lock")
BROKER, CONNECTOR = "broker", "connector"
COMMAND = "python -m examples.kafka.jars"


@dataclass(frozen=True)
class Jar:
    """A line of the lock file."""

    group: str
    artifact: str
    version: str
    sha256: str

    @property
    def file(self) -> str:
        """The name of its file, which has the version in it, so that several versions lie side by side."""
        return f"{self.artifact}-{self.version}.jar"


def locked(part: str) -> list[Jar]:
    """The jars of one part of the lock file.

    >>> [jar.artifact for jar in locked(CONNECTOR)][0]
    'spark-sql-kafka-0-10_2.13'
    """
    found, here = [], ""
    for line in LOCK.read_text(encoding="utf-8").splitlines():
        if line.startswith("["):
            here = line.strip("[]")
        elif line and not line.startswith("#") and here == part:
            found.append(Jar(*line.split()))
    return found


def folder() -> Path:
    """Where the jars are kept."""
    if named := os.environ.get("MIDSTREAM_JARS"):
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "midstream" / "jars"


def present(part: str) -> list[Path]:
    """The files of a part; empty if one of them is missing or damaged."""
    files = [folder() / jar.file for jar in locked(part)]
    return files if all(map(_is_right, files, locked(part))) else []


def spark_jars() -> Path:
    """The folder of Spark's own jars."""
    home = os.environ.get("SPARK_HOME")
    return (Path(home) if home else Path(pyspark.__file__).parent) / "jars"


def java() -> str:
    """The Java that Spark would use."""
    home = os.environ.get("JAVA_HOME")
    return str(Path(home, "bin", "java")) if home else "java"


def fetch() -> None:
    """Fetch what is missing. Raises ``RuntimeError`` if that fails, or if something else comes than the lock says."""
    missing = [jar for part in (BROKER, CONNECTOR) for jar in locked(part) if not _is_right(folder() / jar.file, jar)]
    if not missing:
        return
    with tempfile.TemporaryDirectory(prefix="midstream-jars-") as place:
        _retrieve(missing, Path(place))
        folder().mkdir(parents=True, exist_ok=True)
        for jar in missing:
            got = Path(place, "got", jar.file)
            if not _is_right(got, jar):
                raise RuntimeError(f"{jar.file} is not the one that {LOCK.name} names, or is missing; nothing was kept")
        for jar in missing:
            _keep(Path(place, "got", jar.file), folder() / jar.file)


def _retrieve(jars: list[Jar], place: Path) -> None:
    wanted = "".join(
        f"<dependency org={quoteattr(jar.group)} name={quoteattr(jar.artifact)} rev={quoteattr(jar.version)} "
        f'transitive="false" conf="default->master"/>'
        for jar in jars
    )
    description = place / "ivy.xml"
    # Broker and connector have clients of different versions; by default Ivy would keep the newer one only.
    description.write_text(
        '<ivy-module version="2.0"><info organisation="midstream" module="jars"/>'
        '<configurations><conf name="default"/></configurations>'
        f'<dependencies>{wanted}<conflict manager="all"/></dependencies></ivy-module>',
        encoding="utf-8",
    )
    command = [java(), "-cp", f"{spark_jars()}/*", "org.apache.ivy.Main", "-warn", "-ivy", str(description)]
    if settings := os.environ.get("MIDSTREAM_IVY_SETTINGS"):
        command += ["-settings", settings]
    command += ["-cache", str(place / "cache"), "-retrieve", f"{place}/got/[artifact]-[revision].[ext]"]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"Ivy could not fetch the jars:\n{done.stdout[-3000:]}")


def _keep(got: Path, kept: Path) -> None:
    """Put a file in place at once, because another process may be fetching, too."""
    written = kept.with_name(f"{kept.name}.{os.getpid()}")
    written.write_bytes(got.read_bytes())
    written.replace(kept)


def _is_right(file: Path, jar: Jar) -> bool:
    return file.is_file() and hashlib.sha256(file.read_bytes()).hexdigest() == jar.sha256


if __name__ == "__main__":
    try:
        fetch()
    except (RuntimeError, OSError) as error:
        sys.exit(f"The jars for Kafka are missing: {error}")
    print(f"The jars for Kafka are in {folder()}")
