"""Keeps an instance on its own cores, where `parallel` gives it some."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence

from graphkiln_backend.graph.parallelism import Place


def stay_on(places: Iterable[Place]) -> None:
    """Keeps this thread, and those that it starts from now on, on the cores of an instance.

    Args:
        places: Where the instance runs; nothing happens where they name no cores.
    """
    if cores := {core for place in places for core in place.cores}:
        os.sched_setaffinity(0, cores)


def instance_number(name: str, model: str, counts: Sequence[int]) -> int:
    """Which instance of its model one is, from 0.

    Args:
        name: Of the instance as Triton gives it: `MODEL_GROUP_NUMBER` where a group has no name of its own, else
            `NAME_NUMBER`, which counts within the group.
        model: Name of the model.
        counts: Instances of each group.

    Source: Triton core, `ModelConfigUtils`, `SetDefaultInstanceCount` and the names of instance groups.
    """
    group, _, number = name.rpartition("_")
    index = group.removeprefix(f"{model}_")
    before = sum(counts[: int(index)]) if index.isdecimal() else 0
    return before + int(number) if number.isdecimal() else before
