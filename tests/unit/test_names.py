"""Names in the code follow the glossary: one name, one concept, and one class."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.sources import nodes_of, sources
from tests.unit.test_docs import GLOSSARY, rows_under

# A word that is somebody else's name, or means something else there: where it may be used, and why.
ALLOWED = {
    "node": {
        "txn/": "a part of an expression",
        "flow/transactions/": "a part of an expression",
        "engine/nodes.py": "an operator at work in a task",
        "engine/runner.py": "an operator at work in a task",
    },
}


def names_in(source: str, file: str) -> Iterator[str]:
    """Names of a module and its folders, of its classes and functions, and of their parameters."""
    yield from Path(file).with_suffix("").parts
    for node in nodes_of(source):
        match node:
            case ast.ClassDef(name=name):
                yield name
            case ast.FunctionDef(name=name, args=parameters) | ast.AsyncFunctionDef(name=name, args=parameters):
                yield name
                yield from (parameter.arg for parameter in [*parameters.args, *parameters.kwonlyargs])
            case _:
                pass


def words_of(name: str) -> str:
    """A name as a phrase.

    >>> words_of("_EpochOpened"), words_of("batch_id"), words_of("HTTPServer")
    ('epoch opened', 'batch id', 'http server')
    """
    return " ".join(re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+", name)).lower()


@cache
def unwanted() -> dict[str, re.Pattern[str]]:
    tables = ("Words we do not use", "Names we do not use in the code")
    words = [word.lower() for table in tables for row in rows_under(GLOSSARY, table) for word in row[0].split(", ")]
    return {word: re.compile(rf"\b{re.escape(word)}s?\b") for word in words}


def violations(source: str, file: str) -> list[str]:
    names = {name: words_of(name) for name in names_in(source, file)}
    patterns = {
        word: pattern
        for word, pattern in unwanted().items()
        if not any(file.startswith(place) for place in ALLOWED.get(word, ()))
    }
    return [
        f"{file}: {name}, not {word!r}"
        for word, pattern in patterns.items()
        for name, phrase in names.items()
        if pattern.search(phrase)
    ]


def classes() -> dict[str, list[str]]:
    """Where each class is defined, by its name without leading underscores."""
    found = defaultdict(list)
    for file, source in sources().items():
        for node in nodes_of(source):
            if isinstance(node, ast.ClassDef):
                found[node.name.lstrip("_")].append(file)
    return found


def test_no_name_in_the_code_has_a_word_that_the_glossary_rules_out():
    assert [found for file, source in sources().items() for found in violations(source, file)] == []


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("runtime/attention.py", ""),
        ("standing/files.py", ""),
        ("flow/model.py", "class Vertex: pass"),
        ("flow/model.py", "class NodeSpec: pass"),
        ("change/trial.py", "def is_tried_before(): pass"),
        ("runtime/job.py", "class Job:\n    def start(self, batch_id): pass"),
        ("runtime/job.py", "class Job:\n    def start(self, *, microbatch): pass"),
    ],
)
def test_a_name_with_such_a_word_is_found(file, source):
    assert violations(source, file)


def test_words_are_found_whole_and_exceptions_are_used():
    assert violations("class Nodding:\n    def retried(self, country): pass", "flow/model.py") == []
    for word, places in ALLOWED.items():
        for place in places:
            names = [
                name for file, source in sources().items() if file.startswith(place) for name in names_in(source, file)
            ]
            assert any(re.search(rf"\b{word}s?\b", words_of(name)) for name in names), (
                f"{place} has no {word!r} any more"
            )


def test_no_two_classes_have_the_same_name():
    found = classes()
    assert len(found) > 100
    assert {name: files for name, files in found.items() if len(files) > 1} == {}
