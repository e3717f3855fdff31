"""The layout of images and feature maps, and of the numbers that belong to their channels."""

from __future__ import annotations

from graphkiln_converters.oneflow.building import Op, Value


def check_channels_first(op: Op) -> None:
    """Refuses channels last, which ONNX has not.

    Raises:
        ConversionError: The operation wants them.
    """
    if op.text("data_format", "channels_first") != "channels_first":
        raise op.error("data_format 'channels_last' cannot be translated: save the graph without ONEFLOW_ENABLE_NHWC")


def along_axis(op: Op, numbers: Value, axis: int) -> Value:
    """Numbers `[size]` so that they broadcast along an axis of the first input."""
    shape = [-1] + [1] * (op.rank - 1 - axis)
    if len(shape) == 1:
        return numbers
    if numbers.const_value is not None:
        return op.graph.weight(f"{numbers.name}{shape[1:]}", numbers.const_value.numpy().reshape(shape))
    return op.emit("Reshape", numbers, op.constant(shape))
