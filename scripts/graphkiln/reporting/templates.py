"""Templates of reports: those of this room, and those of the room that asks."""

from __future__ import annotations

from importlib.resources import files

import jinja2

_HERE = "graphkiln.reporting"


def environment(room: str = _HERE) -> jinja2.Environment:
    """Templates with text escaped and nothing undefined.

    Args:
        room: Package whose templates go before those of this one.
    """

    def load(name: str) -> str | None:
        places = [files(each) / name for each in dict.fromkeys((room, _HERE))]
        return next((place.read_text("utf-8") for place in places if place.is_file()), None)

    return jinja2.Environment(
        loader=jinja2.FunctionLoader(load),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
