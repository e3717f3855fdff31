"""Templates: a room's own go before the shared ones."""

from __future__ import annotations

import jinja2
import pytest

from graphkiln.reporting.report import environment


@pytest.mark.parametrize("room", ["graphkiln.story", "graphkiln.tuning"])
def test_rooms_have_pages_in_the_shared_style(room: str) -> None:
    templates = environment(room)
    templates.filters["number"] = templates.filters["word"] = str
    text = templates.loader.get_source(templates, "page.html.j2")[0]  # type: ignore[union-attr]
    assert text.startswith('{% extends "base.html.j2" %}')
    assert "<style>" not in text
    assert templates.get_template("base.html.j2")


def test_what_is_not_there_is_an_error() -> None:
    with pytest.raises(jinja2.TemplateNotFound):
        environment().get_template("page.html.j2")


def test_what_is_not_given_is_an_error() -> None:
    with pytest.raises(jinja2.UndefinedError):
        environment().from_string("{{ nothing }}").render()
