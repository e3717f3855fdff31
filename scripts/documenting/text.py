"""Markdown tables and code, and the contents of docstrings."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Sequence

_SECTION = re.compile(r"^[A-Z]\w+:", re.MULTILINE)
_ATTRIBUTE = re.compile(r"^    (\w+): (.*(?:\n {8,}.*)*)", re.MULTILINE)


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Render a Markdown table without its empty columns; bars within cells are escaped."""
    given = list(rows)
    shown = [number for number in range(len(columns)) if not given or any(row[number] for row in given)]
    lines = [columns, ["---"] * len(columns), *given]
    return "".join(f"| {' | '.join(_cell(line[number]) for number in shown)} |\n" for line in lines)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def code(text: str) -> str:
    """Mark a text as code; an empty one stays empty."""
    return f"`{text}`" if text else ""


def summary_of(documented: object) -> str:
    """The first paragraph of a docstring, on one line."""
    return " ".join((inspect.getdoc(documented) or "").partition("\n\n")[0].split())


def attributes_of(documented: object, section: str = "Attributes") -> dict[str, str]:
    """Parse attributes (or arguments) of a Google docstring: name -> text on one line."""
    _, _, after = (inspect.getdoc(documented) or "").partition(f"\n{section}:\n")
    end = _SECTION.search(after)
    listed = after[: end.start()] if end else after
    return {name: " ".join(text.split()) for name, text in _ATTRIBUTE.findall(listed)}
