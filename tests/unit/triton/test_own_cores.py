"""An instance stays on the cores that the plan gives it."""

from __future__ import annotations

import os

import pytest

from graphkiln_backend.graph.device import CPU, Device
from graphkiln_backend.graph.parallelism import Place
from graphkiln_backend.triton.own_cores import instance_number, stay_on


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


def test_the_cores_of_all_places(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[set[int]] = []
    monkeypatch.setattr(os, "sched_setaffinity", lambda _, cores: kept.append(cores))
    stay_on([Place(CPU, (0, 1)), Place(CPU, (3,))])
    stay_on([Place(Device.gpu(1))])
    stay_on([])
    assert kept == [{0, 1, 3}]
