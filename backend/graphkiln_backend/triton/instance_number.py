"""Which instance of its model a process is: by it, `parallel` gives each one cores of its own."""

from __future__ import annotations

from collections.abc import Sequence


def instance_number(name: str, model: str, groups: Sequence[tuple[str, int]]) -> int:
    """Which instance of its model one is, from 0.

    Args:
        name: Of the instance as Triton gives it: the name of its group and its number within the group.
        model: Name of the model.
        groups: The name of each instance group, empty where it has none of its own (Triton calls it `MODEL_INDEX`
            then), and how many instances it has.

    Source: Triton core, `SetDefaultInstanceCount`, `NormalizeInstanceGroup` and the names of instances.
    """
    own, _, number = name.rpartition("_")
    before = 0
    for index, (group, count) in enumerate(groups):
        if own == (group or f"{model}_{index}") and number.isdecimal():
            return before + int(number)
        before += count
    return 0
