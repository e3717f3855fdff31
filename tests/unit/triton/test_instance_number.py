"""Instances are numbered through all groups of a model."""

from __future__ import annotations

import pytest

from graphkiln_backend.triton.instance_number import instance_number


@pytest.mark.parametrize(
    ("name", "counts", "number"),
    [
        ("digits_0_0", [2], 0),
        ("digits_0_1", [2], 1),
        ("digits_1_0", [2, 1], 2),
        ("my_2_groups_1_1", [3, 2], 4),
        ("own name_1", [2], 1),
        ("digits", [1], 0),
    ],
)
def test_the_number_of_an_instance(name: str, counts: list[int], number: int) -> None:
    assert instance_number(name, "my_2_groups" if name.startswith("my") else "digits", counts) == number
