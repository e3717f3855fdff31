"""Markdown from values and docstrings."""

from __future__ import annotations

from documenting.text import attributes_of, code, summary_of, table


class Documented:
    """What it is,
    on two lines.

    More of it.

    Attributes:
        one: The first,
            on two lines: with a colon.
        two: The second | with a bar.

    Raises:
        three: Not an attribute.
    """  # noqa: D205 - a summary on two lines


def test_a_table_escapes_what_would_end_a_cell() -> None:
    assert table(["a", "b"], [["1|2", "x\ny"]]) == "| a | b |\n| --- | --- |\n| 1\\|2 | x y |\n"


def test_code_of_nothing_is_nothing() -> None:
    assert (code("x"), code("")) == ("`x`", "")


def test_a_summary_is_the_first_paragraph() -> None:
    assert summary_of(Documented) == "What it is, on two lines."


def test_attributes_with_their_continuation() -> None:
    assert attributes_of(Documented) == {
        "one": "The first, on two lines: with a colon.",
        "two": "The second | with a bar.",
    }
    assert attributes_of(Documented, "Raises") == {"three": "Not an attribute."}
    assert attributes_of(code) == {}
