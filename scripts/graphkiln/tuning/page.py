"""What a search found as one self-contained HTML file."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.resources import files
from typing import Any

import jinja2

from graphkiln.tuning.plots import curve, scatter


def render_page(document: Mapping[str, Any]) -> str:
    """Renders a document.

    Args:
        document: As `document_of` makes it.
    """
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    environment.filters["number"] = _number
    environment.filters["word"] = _word
    template = environment.from_string((files(__package__) / "page.html.j2").read_text())
    return template.render(**document, scatter=scatter(document), plot=curve(document))


def _number(value: float | None, digits: int = 4) -> str:
    return "\N{EN DASH}" if value is None else f"{value:.{digits}g}"


def _word(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return ("+".join(map(str, value)) or "none") if isinstance(value, list | tuple) else str(value)
