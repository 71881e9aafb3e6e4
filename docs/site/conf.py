"""How Sphinx makes the site from README, the pages in ``docs`` and docstrings: ``make docs``.

The source folder is the project's, so that links between pages lead to the same places on the site as in a checkout.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from midstream.version import __version__

project = "midstream"
author = copyright = "The midstream authors"
release = version = __version__

root_doc = "README"
include_patterns = ["README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "docs/**"]

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx_copybutton", "sphinxcontrib.mermaid"]
nitpicky = True  # a reference to what is not there fails the build
nitpick_ignore_regex = [
    # Docstrings name internal modules and names of other projects; the site has pages only for what is public.
    (r"py:.*", r"(?!midstream\.(testing|errors|audit|agg)$).*"),
]

myst_heading_anchors = 4  # headings have the anchors that code hosts give them
myst_enable_extensions = ["html_image"]
myst_fence_as_directive = ["mermaid"]

# Methods that come from a base class of ours are listed, those of built-in types are not.
autodoc_default_options = {
    "members": True,
    "inherited-members": "object, str, int, tuple, dict, BaseException",
    "show-inheritance": True,
}
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
python_use_unqualified_type_names = True

html_theme = "furo"
html_title = f"midstream {__version__}"
html_copy_source = False

CONTENTS = {
    "Begin": (
        "docs/getting-started",
        "docs/concepts",
        "docs/coming-from-structured-streaming",
        "docs/when-not-to-use-it",
    ),
    "Use": (
        "docs/state",
        "docs/expressions",
        "docs/transactions",
        "docs/changing",
        "docs/moving-state",
        "docs/controlling",
        "docs/operating",
        "docs/kafka",
        "docs/tables",
    ),
    "Look up": ("docs/reference", "docs/site/api", "docs/glossary", "CHANGELOG"),
    "Inside": (
        "docs/architecture",
        "docs/checkpoint-format",
        "docs/experiments",
        "docs/notes/README",
        "docs/dependencies",
        "CONTRIBUTING",
        "SECURITY",
    ),
}
"""What the site's margin lists. A page that is in none of these, nor linked from the design notes, fails the build."""


def add_contents(_app: Any, page: str, source: list[str]) -> None:
    """Give README the site's contents, and the page of design notes its notes."""
    if page == root_doc:
        for caption, pages in CONTENTS.items():
            source[0] += contents(pages, f":caption: {caption}\n")
    if page == "docs/notes/README":
        source[0] += contents(re.findall(r"\]\((\d[^)]*)\.md\)", source[0]))


def contents(pages: Iterable[str], options: str = "") -> str:
    """A table of contents that only the margin shows."""
    return "\n\n```{toctree}\n:hidden:\n" + options + "\n" + "\n".join(pages) + "\n```\n"


def make_readme_the_front_page(app: Any, error: Exception | None) -> None:
    """A folder is shown by its index."""
    if error is None and app.builder.name == "html":
        shutil.copyfile(Path(app.outdir, "README.html"), Path(app.outdir, "index.html"))


def setup(app: Any) -> None:
    """Called by Sphinx."""
    app.connect("source-read", add_contents)
    app.connect("build-finished", make_readme_the_front_page)
