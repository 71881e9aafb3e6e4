"""Modules of midstream as syntax trees, for tests that read its code. Each process parses a text once."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import midstream

PACKAGE = Path(midstream.__file__).parent


@cache
def sources() -> dict[str, str]:
    """The text of every module, by its path in the package."""
    return {
        path.relative_to(PACKAGE).as_posix(): path.read_text(encoding="utf-8") for path in sorted(PACKAGE.rglob("*.py"))
    }


@cache
def nodes_of(source: str) -> tuple[ast.AST, ...]:
    """All nodes of a text's syntax tree, the module first. They are shared: nobody may change them."""
    return tuple(ast.walk(ast.parse(source)))
