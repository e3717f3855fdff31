"""Which instance of its model a process is: by it, `parallel` gives each one cores of its own."""

from __future__ import annotations

from collections.abc import Sequence


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
