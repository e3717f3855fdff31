"""Gives each node a bias of its own, before ONNX Runtime's quantizer (1.32) does: it names the copies badly.

It appends a number to the name, the first that no initializer has: of `val_6` and up to `val_698` that is `val_699`,
which may be what a node computes. Exporters name values so, and equal biases are one initializer.
Source: `QDQQuantizer._dup_initializer`.
"""

from __future__ import annotations

import onnx

_BIASED = ("Conv", "ConvTranspose", "Gemm", "InstanceNormalization", "LayerNormalization")
"""Whose bias it quantizes. Source: its `operators`, who calls `quantize_bias_tensor`."""
_BIAS = 2
"""Place of the bias among their inputs."""


def separate_biases(graph: onnx.GraphProto) -> None:
    """Copies initializers until no two nodes read the same one as their bias."""
    initializers = {tensor.name: tensor for tensor in graph.initializer}
    taken: set[str] = set()
    for node in graph.node:
        if node.op_type not in _BIASED or len(node.input) <= _BIAS or node.input[_BIAS] not in initializers:
            continue
        name = node.input[_BIAS]
        if name in taken:
            copy = graph.initializer.add()
            copy.CopyFrom(initializers[name])
            copy.name = node.input[_BIAS] = f"{name} of {node.output[0]}"  # names of outputs are unique
        taken.add(name)
