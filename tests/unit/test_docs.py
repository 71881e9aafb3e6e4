"""The pages users read: their code runs, their words are the glossary's, their links lead somewhere.

Blocks of code in a page run in order, in an empty folder, in a process of their own:

* ``python`` runs without Spark, ``python spark`` with it, ``python no-run`` never. Blocks of a page share their names.
* ``python kafka`` runs where a broker is: in ``tests/spark/test_kafka.py``, which gives it a session and topics.
* ``python delta`` runs where ``deltalake`` is installed, ``python iceberg`` where PyIceberg is, too.
* ``python`` whose first line is a comment with a file's name is written to that file instead.
* ``text output`` is what the Python block before it must print.
* ``console`` holds ``$ commands`` and what they must print; ``console spark`` needs Spark.

In what must be printed, ``...`` stands for anything.
"""

from __future__ import annotations

import contextlib
import doctest
import inspect
import io
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import midstream
import midstream.errors
import midstream.testing
from midstream.operators.builder import Flow
from midstream.operators.stream import KeyedStream, Stream

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
PAGES = sorted([README, *(ROOT / "docs").rglob("*.md")])
GLOSSARY = ROOT / "docs" / "glossary.md"
NO_RUN_ALLOWED = 2


@dataclass(frozen=True)
class Block:
    """A fenced block: the words after the fence, its text, and where it starts."""

    words: tuple[str, ...]
    text: str
    where: str

    @property
    def needs_spark(self) -> bool:
        return "spark" in self.words[1:]

    @property
    def needs_kafka(self) -> bool:
        return "kafka" in self.words[1:]

    @property
    def lacks_a_package(self) -> bool:
        needed = {"delta": ("deltalake",), "iceberg": ("deltalake", "pyiceberg", "sqlalchemy")}
        return any(find_spec(package) is None for word in self.words[1:] for package in needed.get(word, ()))

    @property
    def file(self) -> str | None:
        named = re.match(r"# (\w+\.py)\n", self.text)
        return named[1] if named else None


def blocks_of(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    found = []
    for match in re.finditer(r"^```([^\n`]*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        line = text.count("\n", 0, match.start()) + 1
        found.append(Block(tuple(match[1].split()), match[2], f"{page.name}:{line}"))
    return [block for block in found if block.words]


def prose_of(page: Path) -> str:
    """A page without its blocks and its inline code: what is said in words."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"`[^`\n]*`", "", text)


# ── running a page ────────────────────────────────────────────────────────────────────────────────────────────────


def assert_page_prints(page: Path, with_spark: bool, kafka: Mapping[str, Any] | None = None) -> None:
    """Run a page in the current folder; the first thing that is not as the page says ends the process.

    ``kafka`` are the names that blocks for Kafka need.
    """
    names: dict[str, Any] = {"__name__": "page", **(kafka or {})}
    printed = ""
    for block in blocks_of(page):
        idle = (block.needs_spark and not with_spark) or (block.needs_kafka and kafka is None)
        if idle or block.lacks_a_package:
            printed = ""
            continue
        match block.words:
            case ("python", *rest) if "no-run" not in rest:
                printed = run_python(block, names)
            case ("text", "output") if printed:
                expect(block.text, printed, block.where)
            case ("console", *_):
                for command, wanted in commands_of(block):
                    expect(wanted, run_command(command), f"{block.where} $ {command}")


def run_python(block: Block, names: dict[str, Any]) -> str:
    if block.file:
        Path(block.file).write_text(block.text, encoding="utf-8")
        for name, module in list(sys.modules.items()):  # whoever imports one of the page's files again gets the new one
            if Path(getattr(module, "__file__", None) or "/").parent == Path.cwd():
                del sys.modules[name]
        return ""
    out = io.StringIO()
    code = compile(block.text, block.where, "exec")
    with contextlib.redirect_stdout(out):
        exec(code, names)
    return out.getvalue()


def commands_of(block: Block) -> list[tuple[str, str]]:
    """Each command with the lines after it."""
    parts = re.split(r"^\$ (.*)\n", block.text, flags=re.MULTILINE)[1:]
    return list(zip(parts[::2], parts[1::2], strict=True))


def run_command(command: str) -> str:
    # A checkout that was not installed has no command `midstream`, and `python` may be another one.
    command = re.sub(r"^midstream\b", "python -m midstream", command)
    command = re.sub(r"^python\b", f"'{sys.executable}'", command)
    done = subprocess.run(command, shell=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    return done.stdout


def expect(wanted: str, got: str, where: str) -> None:
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    if not doctest.OutputChecker().check_output(wanted, got, flags):
        sys.exit(f"{where}: the page says\n{wanted}\nbut this came out\n{got}")


def run_in_a_process(page: Path, mode: str, folder: Path) -> tuple[int, str]:
    """Run a page's code; the exit code, and what was printed."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "COLUMNS": "120", "PYSPARK_PYTHON": sys.executable}
    command = [sys.executable, __file__, str(page), mode]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    return done.returncode, f"{done.stdout}\n{done.stderr}"


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


WITH_CODE = [
    page for page in PAGES if any(b.words[0] in ("python", "console") and not b.needs_kafka for b in blocks_of(page))
]
WITH_SPARK = [page for page in WITH_CODE if any(b.needs_spark for b in blocks_of(page))]


@pytest.mark.parametrize(
    "page",
    [page if page.name == "README.md" else pytest.param(page, marks=pytest.mark.long) for page in WITH_CODE],
    ids=name_of,
)
def test_the_code_of_a_page_prints_what_the_page_says(page, tmp_path):
    code, told = run_in_a_process(page, "local", tmp_path)
    assert code == 0, told


@pytest.mark.spark
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("page", WITH_SPARK, ids=name_of)
def test_the_code_of_a_page_prints_what_the_page_says_on_spark(page, tmp_path):
    code, told = run_in_a_process(page, "spark", tmp_path)
    assert code == 0, told


def test_a_page_with_wrong_output_fails(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("```python\nprint(1 + 1)\n```\n\n```text output\n3\n```\n")
    code, told = run_in_a_process(page, "local", tmp_path)
    assert code != 0
    assert re.search(r"page.md:5: the page says\s+3", told)


def test_nearly_all_blocks_are_run():
    idle = [block.where for page in PAGES for block in blocks_of(page) if "no-run" in block.words]
    assert len(idle) <= NO_RUN_ALLOWED, idle


def test_every_block_has_known_marks():
    known = {
        "python": {"spark", "no-run", "kafka", "delta", "iceberg"},
        "console": {"spark"},
        "text": {"output"},
        "sh": set(),
        "mermaid": set(),
        "yaml": set(),
    }
    for page in PAGES:
        for block in blocks_of(page):
            language, *marks = block.words
            assert language in known, block.where
            assert set(marks) <= known[language], block.where


# ── links ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def links_of(page: Path) -> list[str]:
    found = re.findall(r"\]\(([^)\s]+)\)|(?:src|srcset|href)=\"([^\"]+)\"", prose_of(page))
    return [markdown or html for markdown, html in found]


def anchors_of(page: Path) -> set[str]:
    """The anchors of headings, made as GitHub makes them."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_link_has_a_target(page):
    for link in links_of(page):
        if re.match(r"https?:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert ROOT in target.parents, link
        if anchor:
            assert anchor in anchors_of(target), link


def test_every_page_can_be_reached_from_the_readme():
    reached, waiting = set(), [ROOT / "README.md"]
    while waiting:
        page = waiting.pop()
        if page in reached or page.suffix != ".md" or not page.exists():
            continue
        reached.add(page)
        waiting += [(page.parent / link.partition("#")[0]).resolve() for link in links_of(page) if "://" not in link]
    assert {name_of(page) for page in PAGES} - {name_of(page) for page in reached} == set()


def test_every_picture_is_shown_and_suits_light_and_dark():
    shown = {(page.parent / link).resolve() for page in PAGES for link in links_of(page)}
    for picture in sorted((ROOT / "docs" / "images").iterdir()):
        assert picture in shown, picture.name
        assert "prefers-color-scheme: dark" in picture.read_text(encoding="utf-8"), picture.name


def test_the_picture_of_the_demo_names_the_operators_of_the_demo():
    picture = (ROOT / "docs" / "images" / "change.svg").read_text(encoding="utf-8")
    drawn = re.findall(r"class=\"name middle\"[^>]*>([^<]+)<", picture)
    code = (ROOT / "examples" / "fraud" / "flow.py").read_text(encoding="utf-8")
    named = re.findall(r"\.(?:source|key_by|lookup|map_batches|route_batches|sink)\(\"([^\"]+)\"", code)
    assert sorted(drawn) == sorted(named)


# ── words ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def rows_under(page: Path, heading: str) -> list[tuple[str, ...]]:
    """The rows of the table under a heading, without its head."""
    section = re.split(r"^#+ ", page.read_text(encoding="utf-8").partition(f"# {heading}\n")[2], flags=re.MULTILINE)[0]
    lines = [line for line in section.splitlines() if line.startswith("|")][2:]
    return [tuple(cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line)[1:-1]) for line in lines]


def sources() -> str:
    return "\n".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / "src").rglob("*.py")))


def test_every_word_of_the_glossary_is_used():
    others = "\n".join(page.read_text(encoding="utf-8") for page in PAGES if page != GLOSSARY)
    everything = f"{sources()}\n{others}".lower()
    words = [row[0].strip("*") for row in rows_under(GLOSSARY, "The words")]
    assert len(words) > 20
    assert [word for word in words if not re.search(rf"\b{re.escape(word.lower())}", everything)] == []
    assert words == sorted(words, key=str.lower)


@pytest.mark.parametrize("page", [page for page in PAGES if page != GLOSSARY], ids=name_of)
def test_a_page_uses_one_name_for_one_concept(page):
    unwanted = [word for row in rows_under(GLOSSARY, "Words we do not use") for word in row[0].split(", ")]
    assert "node" in unwanted
    prose = prose_of(page)
    assert [word for word in unwanted if re.search(rf"\b{re.escape(word)}s?\b", prose, re.IGNORECASE)] == []


def test_the_code_has_every_message_that_the_pages_explain():
    # Python joins neighbouring strings; so does this, to find a message however its lines are broken.
    code = re.sub(r"\"\s*\n\s*f?\"", "", sources())
    rows = rows_under(ROOT / "docs" / "operating.md", "What a message means")
    assert len(rows) > 8
    for message, *_ in rows:
        for piece in message.strip("`").split("…"):
            assert piece.strip() in code, message


# ── the reference ─────────────────────────────────────────────────────────────────────────────────────────────────

REFERENCE = ROOT / "docs" / "reference.md"


def public_methods(kind: type) -> dict[str, Any]:
    return {name: member for name, member in vars(kind).items() if not name.startswith("_") and callable(member)}


@pytest.mark.parametrize("kind", [Flow, Stream, KeyedStream], ids=lambda kind: kind.__name__)
def test_the_reference_gives_every_method_with_its_parameters(kind):
    text = REFERENCE.read_text(encoding="utf-8")
    for name, method in public_methods(kind).items():
        shown = re.search(rf"`\w*\.{name}\((.*?)\)`", text)
        assert shown, f"{kind.__name__}.{name} is missing"
        given = [re.split(r"[=:]", part)[0].strip() for part in shown[1].split(",")]
        declared = [
            f"*{p.name}" if p.kind is p.VAR_POSITIONAL else p.name
            for p in list(inspect.signature(method).parameters.values())[1:]
        ]
        assert [part for part in given if part != "*"] == declared, name


def test_the_reference_names_everything_that_is_exported():
    text = REFERENCE.read_text(encoding="utf-8")
    names = {*midstream.__all__, *midstream.testing.__all__, *midstream.errors.__all__} - {"__version__"}
    assert sorted(name for name in names if not re.search(rf"`[^`\n]*\b{name}\b", text)) == []


def commands() -> dict[str, Any]:
    """What ``midstream --help`` lists."""
    from typer.main import get_command

    from midstream.cli.app import app

    return dict(get_command(app).commands)  # type: ignore[attr-defined]


def test_the_readme_lists_every_command_once():
    listed = [row[0].strip("`").split()[1] for row in rows_under(README, "The command line")]
    assert sorted(listed) == sorted(commands())


def test_the_first_screen_of_the_readme_installs_then_changes_a_running_job():
    first, *_ = [block for block in blocks_of(README) if block.words[0] == "python"]
    [install, *_] = [block for block in blocks_of(README) if block.words[0] == "sh"]
    assert install.text.startswith("pip install ")
    assert re.search(r"job\.update\(\s*Update\(", first.text)
    assert "print(change.wait()" in first.text


def test_the_reference_names_every_command_and_option():
    text = REFERENCE.read_text(encoding="utf-8")
    for name, command in commands().items():
        assert f"midstream {name}" in text
        for parameter in command.params:
            option = max(parameter.opts, key=len)
            if option.startswith("--") and option != "--help":
                assert f"`{option}" in text, f"{name} {option}"


def test_the_reference_names_every_public_part_of_a_job():
    pytest.importorskip("pyspark")
    from midstream.runtime.spark.job import Job

    text = REFERENCE.read_text(encoding="utf-8")
    internal = {"started", "on_epoch"}  # called by midstream and by Spark
    parts = {name for name in dir(Job) if not name.startswith("_")} - internal
    assert sorted(name for name in parts if f"job.{name}" not in text) == []


def test_every_promise_under_a_fault_names_an_existing_test():
    page = (ROOT / "docs" / "operating.md").read_text()
    table = page.partition("## What is promised under which fault")[2].partition("\n## ")[0]
    rows = [line for line in table.splitlines() if line.startswith("|")][2:]
    named = [re.findall(r"`(test_\w+)`", row.split("|")[3]) for row in rows]
    assert len(rows) > 20
    assert all(len(tests) == 1 for tests in named)
    defined = {
        name for file in (ROOT / "tests").rglob("test_*.py") for name in re.findall(r"def (test_\w+)", file.read_text())
    }
    assert {test for [test] in named} <= defined


if __name__ == "__main__":
    sys.path.insert(0, os.getcwd())
    assert_page_prints(Path(sys.argv[1]), sys.argv[2] == "spark")
