"""Instances are numbered through all groups of a model."""

from __future__ import annotations

import pytest

from graphkiln_backend.triton.model import instance_number


@pytest.mark.parametrize(
    ("name", "groups", "number"),
    [
        ("digits_0_0", [("", 2)], 0),
        ("digits_0_1", [("", 2)], 1),
        ("digits_1_0", [("", 2), ("", 1)], 2),
        ("digits_1_0", [("digits_0", 2), ("digits_1", 1)], 2),
        ("own name_1", [("own name", 2)], 1),
        ("fast_0", [("slow", 3), ("fast", 2)], 3),
        ("fast_1", [("slow", 3), ("fast", 2)], 4),
        ("slow_2", [("slow", 3), ("fast", 2)], 2),
        ("digits_1_0", [("digits_1", 2), ("digits_0", 1)], 0),
        ("digits", [("", 1)], 0),
    ],
)
def test_the_number_of_an_instance(name: str, groups: list[tuple[str, int]], number: int) -> None:
    """Names that a person gave to groups say nothing about where they stand."""
    assert instance_number(name, "digits", groups) == number


def test_numbers_in_the_name_of_a_model_are_none_of_a_group() -> None:
    assert instance_number("my_2_groups_1_1", "my_2_groups", [("", 3), ("", 2)]) == 4


def test_no_two_instances_of_named_groups_have_one_number() -> None:
    groups = [("a", 2), ("b", 3), ("", 1)]
    names = [f"{group or 'm_2'}_{number}" for group, count in groups for number in range(count)]
    assert [instance_number(name, "m", groups) for name in names] == list(range(6))
