"""What a session of ONNX Runtime takes and computes, as tensors that Triton carries."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnxruntime

from graphkiln_backend.engines.onnxruntime.values import ranked
from graphkiln_backend.graph.dtypes import DType
from graphkiln_backend.graph.errors import LoweringError, ManifestError
from graphkiln_backend.graph.signature import Signature, TensorSpec, free_dim


def signature_of(session: onnxruntime.InferenceSession, graph_path: Path) -> Signature:
    """The session's inputs and outputs; outputs that are no tensors can be requested by name, and are not told of.

    Args:
        session: The session.
        graph_path: What it runs.

    Raises:
        LoweringError: One of them is not a tensor that Triton can carry, or no output is a tensor.
    """
    outputs = session.get_outputs()
    tensors = list({node.name: node for node in outputs if node.type.startswith("tensor(")}.values())
    if outputs and not tensors:
        listed = ", ".join(f"{node.name}: {node.type}" for node in outputs)
        raise LoweringError(
            f"ONNX Runtime cannot serve {graph_path}",
            attempts=(f"no output is a tensor that Triton carries: {listed}",),
        )
    try:
        return Signature(
            inputs=ranked(tuple(_spec(node) for node in session.get_inputs()), graph_path),
            outputs=tuple(map(_spec, tensors)),
            optional_inputs=tuple(_spec(node) for node in session.get_overridable_initializers()),
        )
    except ManifestError as error:
        raise LoweringError(f"ONNX Runtime cannot serve {graph_path}", attempts=(str(error),)) from error


def _spec(node: Any) -> TensorSpec:
    return TensorSpec(
        name=node.name,
        dtype=DType.from_onnxruntime(node.type),
        # ONNX Runtime gives None for a dimension without a name, or the -1 that an older exporter wrote.
        shape=tuple(free_dim(node.name, axis) if dim in (None, -1) else dim for axis, dim in enumerate(node.shape)),
    )
