"""Where OpenVINO computes otherwise than ONNX says: mended in the graph that it has read, or refused.

Seen with 2026.4, whose CPU plugin computes in types of 32 bits at most.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from mmap import ACCESS_READ, mmap
from pathlib import Path

import numpy as np
import openvino
from openvino import opset13

from graphkiln_backend.engines.hardware import saturates_products_of_bytes
from graphkiln_backend.engines.openvino_intervals import LIMIT
from graphkiln_backend.graph.dtypes import AnyArray, DType
from graphkiln_backend.graph.errors import LoweringError, SignatureError
from graphkiln_backend.graph.signature import Signature

DEVICE = "CPU"
_SUPPRESSION = "NonMaxSuppression"
_OVERLAP = 3
"""Index of its input that says how far boxes may overlap."""
_NEXT = np.float32(1.5 * 2.0**-24)
"""A positive float32 and this share of it add up to the next float32: between 0.75 and 1.5 of its last bit."""
_FIRST_ARRAY = openvino.Tensor(np.zeros(1, np.float32)).data
"""Made while this module is imported, which one thread does. The first array that OpenVINO (2026.4) shows fills a
table, and gives Python's lock back meanwhile: a second thread then waits for the table with the lock in its hands, and
the whole process stands still."""
_WIDE = (DType.INT64.numpy, DType.UINT64.numpy)
_WIDE_TYPES = (openvino.Type.i64, openvino.Type.u64)
_LEVELS_OF_7_BITS = 128
_NARROW = np.iinfo(np.int32)
_SHORT_TYPES = (openvino.Type.i8, openvino.Type.i16)
_WINDOW = b"_window_size"
"""The end of the names of both attributes of `Attention`."""
_COMPUTED_WITH = frozenset(
    (
        *("Add", "Subtract", "Multiply", "Divide", "Mod", "FloorMod", "Power", "Gather", "Select"),
        *("BitwiseAnd", "BitwiseOr", "BitwiseXor"),
    )
)
"""Operations in whose outputs a constant that was cut off shows."""


def open_core() -> openvino.Core:
    """A core whose CPU plugin is loaded, in a thread of its own.

    The plugin replaces the signal stack of the thread that loads it, and puts the former one back when it ends (seen
    with 2026.4 on a processor with AVX512). Of two that end in another order than last in, first out, one puts back
    what the other has freed: the next signal, such as Ctrl-C, then kills the process. A thread that is over has no
    signals.
    (One core for all sessions is no way out: there, `infer` crashed after other sessions had ended.)
    """
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(_load_plugin).result()


def _load_plugin() -> openvino.Core:
    core = openvino.Core()
    core.get_property(DEVICE, "FULL_DEVICE_NAME")
    return core


def read_graph(core: openvino.Core, path: Path) -> openvino.Model:
    """Reads a graph so that it computes what ONNX says.

    OpenVINO suppresses boxes that overlap by as much as the limit; ONNX those that overlap by more. With a limit of 0,
    which is ONNX's default, OpenVINO keeps a single box, and ONNX all that do not touch.

    Raises:
        RuntimeError: OpenVINO refuses it.
        LoweringError: It computes with a constant of more than 32 bits, or otherwise than ONNX says.
    """
    model = core.read_model(str(path))
    for operation in model.get_ordered_ops():
        _check_constant(operation)
        _check_integer_products(operation)
        _check_shift(operation)
        _check_window(operation, path)
        if operation.get_type_name() == _SUPPRESSION and len(operation.inputs()) > _OVERLAP:
            _raise_limit(operation.input(_OVERLAP))
    return model


def _check_constant(operation: openvino.Node) -> None:
    """Refuses a constant that OpenVINO would cut off to 32 bits: a hash, a time in nanoseconds.

    The end of a slice may be as large as it likes, so only those count that are computed with.

    Raises:
        LoweringError: There is one.
    """
    if operation.get_type_name() != "Constant" or operation.get_output_element_type(0) not in _WIDE_TYPES:
        return
    users = {each.get_node().get_type_name() for each in operation.output(0).get_target_inputs()} & _COMPUTED_WITH
    if users and not _fits(operation.get_data()):
        raise LoweringError(
            "OpenVINO computes integers in 32 bits",
            attempts=(f"{min(users)} computes with a constant that takes more",),
            hint="set engine: onnxruntime",
        )


def _check_integer_products(operation: openvino.Node) -> None:
    """Refuses values of 8 bits on a CPU that cuts their sums of products off; 7 bits cannot overflow.

    Raises:
        LoweringError: This is one.
    """
    if operation.get_type_name() != "FakeQuantize" or not saturates_products_of_bytes():
        return
    if operation.get_attributes()["levels"] > _LEVELS_OF_7_BITS:
        raise LoweringError(
            "OpenVINO's products of int8 overflow on this CPU, which has no VNNI instructions",
            attempts=(operation.get_friendly_name(),),
            hint="set engine: onnxruntime, which computes them without overflow here",
        )


def _check_shift(operation: openvino.Node) -> None:
    """Refuses shifts of short signed integers: they become powers of two, which overflow otherwise than ONNX says.

    Raises:
        LoweringError: This is one.
    """
    if operation.get_type_name() == "Power" and operation.get_output_element_type(0) in _SHORT_TYPES:
        raise LoweringError(
            "OpenVINO shifts signed integers of 8 and 16 bits otherwise than ONNX says",
            attempts=(operation.get_friendly_name(),),
            hint="set engine: onnxruntime",
        )


def _check_window(operation: openvino.Node, path: Path) -> None:
    """Refuses attention within a window: OpenVINO leaves the window out, and what it has read does not show it.

    Raises:
        LoweringError: This is attention, and the file names a window.
    """
    if operation.get_type_name() != "ScaledDotProductAttention":
        return
    with path.open("rb") as file, mmap(file.fileno(), 0, access=ACCESS_READ) as content:
        if content.find(_WINDOW) >= 0:
            raise LoweringError(
                "OpenVINO leaves out the window of Attention",
                attempts=(operation.get_friendly_name(),),
                hint="set engine: onnxruntime",
            )


def _fits(values: AnyArray) -> bool:
    """Whether integers fit into 32 bits."""
    return not values.size or (int(values.min()) >= _NARROW.min and int(values.max()) <= _NARROW.max)


def _raise_limit(limit: openvino.Input) -> None:
    """To the next number, which at least that many reach exactly when more than before is reached."""
    source = limit.get_source_output()
    above = opset13.add(source, opset13.multiply(source, opset13.constant(_NEXT)))
    above = opset13.maximum(above, opset13.constant(np.finfo(np.float32).tiny))
    limit.replace_source_output(above.output(0))


def suppresses(compiled: openvino.CompiledModel) -> bool:
    """Whether a compiled graph suppresses boxes."""
    operations = compiled.get_runtime_model().get_ordered_ops()
    return any(_SUPPRESSION in str(each.get_rt_info()["layerType"].astype(str)) for each in operations)


def check_types(signature: Signature) -> None:
    """Refuses a graph whose tensors hold more than OpenVINO computes in.

    Raises:
        LoweringError: One of them is FP64: infinities would come back as the largest FP32.
    """
    wide = [spec.name for spec in (*signature.inputs, *signature.outputs) if spec.dtype is DType.FP64]
    if wide:
        raise LoweringError(
            "OpenVINO computes FP64 in FP32", attempts=(f"'{wide[0]}' is FP64",), hint="set engine: onnxruntime"
        )


def check_values(name: str, array: AnyArray, limit: int = LIMIT) -> None:
    """Refuses what OpenVINO would cut off: it computes integers of 64 bits in 32.

    Args:
        name: The input.
        array: Its values.
        limit: What they must be less than, and at least the negative of.

    Raises:
        SignatureError: One does not fit.
    """
    if not array.size or not (array.dtype in _WIDE or (limit < LIMIT and array.dtype.kind in "iu")):
        return
    least, most = int(array.min()), int(array.max())
    if least < -limit or most >= limit:
        raise SignatureError(
            f"input '{name}' does not fit: OpenVINO computes integers in 32 bits (engine: onnxruntime takes all)",
            expected=f"{-limit} to {limit - 1}",
            got=f"{least} to {most}",
        )
