"""Single operations of OneFlow, translated to ONNX and run by ONNX Runtime without optimization."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx_ir
import onnxruntime

from graphkiln_backend.graph.dtypes import AnyArray
from graphkiln_converters.oneflow.building import GraphBuilder, Op, Value
from graphkiln_converters.oneflow.mlir import Attribute, Job, Operation, TensorType
from graphkiln_converters.oneflow.translation import translate

ELEMENTS = {"float32": "f32", "float64": "f64", "int32": "si32", "int64": "si64", "int8": "si8", "bool": "i1"}


def type_of(array: AnyArray) -> TensorType:
    """MLIR type of an array."""
    return TensorType(array.shape, ELEMENTS[array.dtype.name])


def operation(
    kind: str, operands: Sequence[TensorType], results: Sequence[TensorType], **attributes: Attribute
) -> Operation:
    """An operation `an_op` of `%arg0`, `%arg1`, ... with the results `%0`, `%1`, ..."""
    return Operation(
        kind=kind,
        operands=tuple(f"%arg{number}" for number in range(len(operands))),
        results=tuple(f"%{number}" for number in range(len(results))),
        attributes={"op_name": "an_op", **attributes},
        operand_types=tuple(operands),
        result_types=tuple(results),
        line=3,
    )


def op(*operands: TensorType, kind: str = "any", results: Sequence[TensorType] = (), **attributes: Attribute) -> Op:
    """An operation of inputs `x0`, `x1`, ... for a translator."""
    values = [
        Value(name=f"x{number}", shape=onnx_ir.Shape(type_.shape), type=onnx_ir.TensorType(onnx_ir.DataType.FLOAT))
        for number, type_ in enumerate(operands)
    ]
    return Op(operation=operation(kind, operands, results, **attributes), inputs=values, graph=GraphBuilder())


def job_of(single: Operation) -> Job:
    """A job of one operation that returns all its results."""
    return Job(
        name="G",
        arguments=dict(zip(single.operands, single.operand_types, strict=True)),
        operations=(single,),
        returns=single.results,
    )


def run_model(model: onnx_ir.Model, feeds: Mapping[str, AnyArray]) -> list[AnyArray]:
    """Run a graph; return its outputs in order."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = 1
    content = onnx_ir.to_proto(model).SerializeToString()
    session = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    outputs: list[AnyArray] = session.run(None, dict(feeds))
    return outputs


def run_operator(
    kind: str, inputs: Sequence[AnyArray], like: Sequence[AnyArray], **attributes: Attribute
) -> list[AnyArray]:
    """Run an operation whose results are declared with the types and shapes of `like`."""
    single = operation(kind, [type_of(x) for x in inputs], [type_of(y) for y in like], **attributes)
    model = translate(job_of(single), Path("nowhere"))
    return run_model(model, {f"INPUT_{number}": array for number, array in enumerate(inputs)})


def check_operator(
    kind: str,
    inputs: Sequence[AnyArray],
    expected: AnyArray | Sequence[AnyArray],
    *,
    tolerance: float = 1e-5,
    **attributes: Attribute,
) -> None:
    """Compare the results of an operation, their types and shapes."""
    references = [expected] if isinstance(expected, np.ndarray) else list(expected)
    for found, array in zip(run_operator(kind, inputs, references, **attributes), references, strict=True):
        assert (found.dtype, found.shape) == (array.dtype, array.shape)
        np.testing.assert_allclose(found, array, rtol=tolerance, atol=tolerance)
