"""Hints for names that do not exist."""

from __future__ import annotations

import pytest

from graphkiln_backend.graph.text import did_you_mean, nearest


@pytest.mark.parametrize(
    ("name", "known", "hint"),
    [
        ("labls", ["labels", "layout"], "did you mean 'labels'?"),
        ("zzz", ["labels", "layout"], "known: labels, layout"),
        ("zzz", [], "known: none"),
        ("", ["labels"], "known: labels"),
    ],
)
def test_the_nearest_name_or_all(name: str, known: list[str], hint: str) -> None:
    assert did_you_mean(name, known) == hint


def test_a_prefix_is_shown_and_not_compared() -> None:
    assert did_you_mean("modle", ["model", "port"], prefix="--") == "did you mean '--model'?"


def test_a_long_list_can_be_replaced() -> None:
    assert did_you_mean("zzz", ["a"], otherwise="see --help") == "see --help"
    assert did_you_mean("aa", ["aaa"], otherwise="see --help") == "did you mean 'aaa'?"


def test_names_may_come_once_only() -> None:
    assert did_you_mean("zzz", (name for name in ("a", "b"))) == "known: a, b"


def test_of_a_thousand_names_some_are_shown() -> None:
    hint = did_you_mean("zzz", [f"n{number}" for number in range(1000)])
    assert hint.endswith("n39 and 960 more")


def test_the_nearest_name_alone() -> None:
    assert nearest("labls", ["labels", "layout"]) == "labels"
    assert nearest("zzz", ["labels"]) == ""
