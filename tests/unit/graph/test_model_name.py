"""Names of models."""

from __future__ import annotations

import pytest

from graphkiln_backend.graph.text import MAX_LENGTH, fault_in_name, fault_in_served_name, in_path


@pytest.mark.parametrize("name", ["m", "resnet50", "ViT_b-16.v2", "_m", "9", "a" * MAX_LENGTH])
def test_names_of_models(name: str) -> None:
    assert fault_in_name(name) == ""
    assert fault_in_served_name(name) == ""


@pytest.mark.parametrize(
    "name",
    [
        *("", ".", "..", ".hidden", "-flag", "a/b", "../m", "a\\b", "a b", "a\n", "\n", "a\x00", "a\x1b[2J", "\x7f"),
        *("m\u00fcll", "a\u202eb", "\u0661", "a;b", "$(x)", "a'b", "a*", "m" * (MAX_LENGTH + 1), "m" * 256),
    ],
)
def test_what_is_none(name: str) -> None:
    fault = fault_in_name(name)
    assert fault.isprintable()
    assert fault
    assert len(fault) < 200


@pytest.mark.parametrize("name", ["a b", "a;touch x", "$(x)", "`x`", "a\nb", "a&b", "a'b", "", "m" * 201])
def test_what_a_shell_would_not_hand_on(name: str) -> None:
    assert fault_in_served_name(name)


@pytest.mark.parametrize("name", ["a+b", "a@2", "-m", "m" * 200])
def test_a_store_may_hold_more_than_is_written(name: str) -> None:
    assert fault_in_served_name(name) == ""


@pytest.mark.parametrize("name", ["a+b", "a@2", "a=b,c:d", "100%", "a%20b", "-m"])
def test_triton_compares_paths_with_names_as_they_come(name: str) -> None:
    """Whoever may be served is named as he is: no escape is undone. tests/integration/test_page_programs.py asks it."""
    assert not fault_in_served_name(name)
    assert in_path(name) == name


@pytest.mark.parametrize(
    ("name", "path"), [("a/b", "a%2Fb"), ("a?b#c", "a%3Fb%23c"), ("a b", "a%20b"), ("\u00e4", "%C3%A4")]
)
def test_what_a_path_cannot_hold_is_escaped(name: str, path: str) -> None:
    assert in_path(name) == path
