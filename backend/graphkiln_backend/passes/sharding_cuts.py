"""Cuts through the tensors of a graph whose products are sharded.

A tensor is cut along an axis into as many equal parts as there are shards; with `outer` blocks along that axis, each
block is cut, so that queries, keys and values that lie behind each other in one weight are cut alike.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx_ir

Value = onnx_ir.Value


@dataclass(frozen=True, slots=True)
class Cut:
    """A cut through a tensor.

    Attributes:
        axis: Along which it is cut.
        outer: Blocks along that axis, each of which is cut.
    """

    axis: int
    outer: int = 1

    def indices(self, size: int, shards: int, shard: int) -> Any:
        """What a shard holds along the axis, INT64 `[size / shards]`."""
        blocks = np.arange(size).reshape(self.outer, shards, size // (self.outer * shards))
        return blocks[:, shard].reshape(-1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Effects:
    """What follows for a node.

    Attributes:
        values: Cuts through the activations that it reads and computes.
        weights: Cuts through its weights, by the number of the input.
        first_only: Weights that the first shard alone has, and zeros elsewhere: a sum would add them for each shard.
        target: Of a Reshape: the cut through its output, whose size stands in the weight that names the shape.
        reduced: Whether its output is a partial sum.
    """

    values: Mapping[Value, Cut] = field(default_factory=dict)
    weights: Mapping[int, Cut] = field(default_factory=dict)
    first_only: frozenset[int] = frozenset()
    target: Cut | None = None
    reduced: bool = False


class CannotShard(Exception):
    """A cut cannot be carried on; the text says why."""


def is_weight(value: Value | None) -> bool:
    """Whether a tensor is a weight whose content is known."""
    return value is not None and value.is_initializer() and value.const_value is not None


def check_divides(value: Value, cut: Cut, shards: int) -> None:
    """Raises `CannotShard` where a tensor cannot be cut into equal parts."""
    size = dims(value)[cut.axis]
    if not isinstance(size, int) or size % (cut.outer * shards):
        raise CannotShard(f"'{value.name}' has {size} in dimension {cut.axis}, which {shards} shards do not divide")


def dims(value: Value | None) -> list[Any]:
    """The shape of a tensor; raises `CannotShard` where it is not known."""
    if value is None or value.shape is None:
        raise CannotShard(f"the shape of '{value.name if value else 'a tensor'}' is not known")
    return list(value.shape)
