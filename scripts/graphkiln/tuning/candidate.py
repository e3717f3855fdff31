"""A candidate: one value for each key that is tuned."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Self

Value = str | int | bool | tuple[int, ...]
"""What a key can be set to; a tuple of batch sizes for `preferred_batch_sizes`."""

ENGINE, PRECISION, THREADS, STREAMS, SPIN = "engine", "precision", "threads", "streams", "spin"
INSTANCES, MAX_BATCH_SIZE, PREFERRED = "instances", "max_batch_size", "preferred_batch_sizes"
QUEUE_DELAY_US = "max_queue_delay_us"
"""Microseconds that the dynamic batcher waits for more requests; -1 for no dynamic batcher."""
NOTHING = "none"
"""As people write a list of nothing."""
SESSION_KEYS = (ENGINE, PRECISION, THREADS, STREAMS, SPIN)
"""What a bare session depends on; the other keys are the scheduler's."""


@dataclass(frozen=True)
class Candidate:
    """Values by key; equal values make equal candidates, whatever their order.

    Attributes:
        items: The keys in alphabetical order, each with its value.
    """

    items: tuple[tuple[str, Value], ...]

    @classmethod
    def of(cls, values: Mapping[str, Value]) -> Self:
        """The candidate with these values."""
        return cls(tuple(sorted(values.items())))

    @classmethod
    def from_json(cls, values: Mapping[str, str | int | bool | list[int]]) -> Self:
        """The candidate that `as_json` wrote."""
        return cls.of({key: tuple(value) if isinstance(value, list) else value for key, value in values.items()})

    @cached_property
    def values(self) -> dict[str, Value]:
        """The values by key."""
        return dict(self.items)

    @cached_property
    def id(self) -> str:
        """Ten hexadecimal digits, the same in every process and for ever."""
        return hashlib.sha256(json.dumps(self.as_json(), sort_keys=True).encode()).hexdigest()[:10]

    def __getitem__(self, key: str) -> Value:
        return self.values[key]

    def __contains__(self, key: str) -> bool:
        return key in self.values

    def number(self, key: str, default: int = 1) -> int:
        """The value of a key that holds a number; the default where the key is not tuned."""
        value = self.values.get(key, default)
        return value if isinstance(value, int) else default

    def with_values(self, values: Mapping[str, Value]) -> Self:
        """The candidate with some values replaced or added."""
        return type(self).of(self.values | dict(values))

    def restricted_to(self, keys: Iterable[str]) -> Self:
        """The part of the candidate that these keys make."""
        kept = set(keys)
        return type(self)(tuple(item for item in self.items if item[0] in kept))

    def as_json(self) -> dict[str, Value | list[int]]:
        """The values as JSON data."""
        return {key: list(value) if isinstance(value, tuple) else value for key, value in self.items}

    def __str__(self) -> str:
        return ", ".join(f"{key}={format_value(value)}" for key, value in self.items)


def format_value(value: Value | list[int]) -> str:
    """A value as people write it, and `--fix` reads it.

    Args:
        value: Of a candidate, or as JSON has it.
    """
    if isinstance(value, bool):
        return "on" if value else "off"
    return "+".join(map(str, value)) or NOTHING if isinstance(value, tuple | list) else str(value)
