"""The layout of feature maps, and of the parameters of their channels."""

from __future__ import annotations

from graphkiln_converters.oneflow.building import Op, Value


def check_channels_first(op: Op) -> None:
    """Rejects channels last, which ONNX does not have.

    Raises:
        ConversionError: The operation works on channels last.
    """
    if op.text("data_format", "channels_first") != "channels_first":
        raise op.error("data_format 'channels_last' cannot be translated: save the graph without ONEFLOW_ENABLE_NHWC")


def align_to_axis(op: Op, values: Value, axis: int) -> Value:
    """Values `[size]`, reshaped so that they broadcast along an axis of the first input."""
    shape = [-1] + [1] * (op.rank - 1 - axis)
    if len(shape) == 1:
        return values
    if values.const_value is not None:
        return op.graph.weight(f"{values.name}{shape[1:]}", values.const_value.numpy().reshape(shape))
    return op.emit("Reshape", values, op.constant(shape))
