"""Names of models."""

from __future__ import annotations

import pytest

from graphkiln_backend.graph.model_name import MAX_LENGTH, fault_in_name, fault_in_served_name


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


@pytest.mark.parametrize("name", ["a b", "a;touch x", "$(x)", "`x`", "a\nb", "a&b", "a'b", ""])
def test_what_a_shell_would_not_hand_on(name: str) -> None:
    assert fault_in_served_name(name)


@pytest.mark.parametrize("name", ["a+b", "a@2", "-m", "m" * 200])
def test_a_store_may_hold_more_than_is_written(name: str) -> None:
    assert fault_in_served_name(name) == ""
