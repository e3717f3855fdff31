"""Writes down the shapes that a graph computes for its Reshapes, where they are known but for the sizes that vary.

Exporters compute `[batch, 128, 12, 64]` from the shape of an input; as `[-1, 128, 12, 64]` it needs no computing, and
whoever changes the 12 knows where it stands.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from graphkiln_backend.passes.sharding_cuts import add_weight


def state_shapes(model: onnx_ir.Model) -> None:
    """Replaces computed shapes of Reshapes by weights, in place; what only they needed goes.

    Args:
        model: The graph, its shapes inferred.
    """
    made: dict[tuple[int, ...], onnx_ir.Value] = {}
    for node in model.graph:
        if node.op_type != "Reshape" or node.domain not in ("", "ai.onnx") or len(node.inputs) < 2:
            continue
        shape = node.inputs[1]
        sizes = None if shape is None or shape.is_initializer() else _sizes(node)
        if sizes is not None:
            if sizes not in made:
                made[sizes] = _weight(model, sizes)
            node.replace_input_with(1, made[sizes])
            node.attributes.pop("allowzero", None)
    RemoveUnusedNodesPass()(model)


def _sizes(node: onnx_ir.Node) -> tuple[int, ...] | None:
    """The shape that a Reshape computes: 0 for a size of its input at the same place, -1 for one other that varies."""
    data, out = node.inputs[0], node.outputs[0].shape
    if data is None or out is None:
        return None
    before: list[Any] = list(data.shape) if data.shape is not None else []
    sizes = []
    for axis, size in enumerate(out):
        if isinstance(size, int):
            sizes.append(size)
        else:
            sizes.append(0 if axis < len(before) and size.value is not None and before[axis] == size else -1)
    return tuple(sizes) if sizes.count(-1) <= 1 and not any(size == 0 for size in out) else None


def _weight(model: onnx_ir.Model, sizes: tuple[int, ...]) -> onnx_ir.Value:
    name = "shape_" + "_".join(map(str, sizes)).replace("-1", "rest")
    return add_weight(model, name, np.array(sizes, np.int64))
