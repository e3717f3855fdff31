"""Compute single nodes whose inputs are constants."""

from __future__ import annotations

import onnx
import onnxruntime

from graphkiln_backend.engines.onnxruntime.loading import CPU, disable_optimizations
from graphkiln_backend.graph.dtypes import AnyArray
from graphkiln_backend.graph.errors import LoweringError

# Types of results that ONNX Runtime's binding returns as they are: it has no arrays of 4 bits and of bf16, and returns
# FLOAT8 as bytes.
_TYPES = frozenset(
    f"tensor({name})"
    for name in (
        *("bool", "double", "float", "float16", "int8", "int16", "int32", "int64"),
        *("string", "uint8", "uint16", "uint32", "uint64"),
    )
)


def compute_node(node: onnx.NodeProto, weights: list[onnx.TensorProto], like: onnx.ModelProto) -> list[AnyArray]:
    """Compute a node by the kernel that a session on the CPU would use.

    Args:
        node: The node; no input is an input of the graph.
        weights: Its inputs.
        like: Supplies IR version and operator sets.

    Returns:
        Its outputs in order; text as arrays of `str`.

    Raises:
        LoweringError: ONNX Runtime does not compute the node, or has no array for a result.
    """
    outputs = [onnx.ValueInfoProto(name=name) for name in node.output]
    graph = onnx.helper.make_graph([node], "constants", [], outputs, weights)
    model = onnx.helper.make_model(graph, opset_imports=like.opset_import, ir_version=like.ir_version)
    options = onnxruntime.SessionOptions()
    disable_optimizations(options)
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 4
    try:
        session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=[CPU])
        types = [result.type for result in session.get_outputs()]
        if _TYPES.issuperset(types):
            return list(session.run(None, {}))
    except Exception as error:  # errors of ONNX Runtime have no common base class, and protobuf has its own
        raise LoweringError(f"ONNX Runtime cannot compute {node.op_type}", attempts=(str(error),)) from error
    raise LoweringError(f"ONNX Runtime has no array for a result of {node.op_type}", attempts=tuple(types))
