"""Where OpenVINO computes otherwise than ONNX says: mended in the graph that it has read, or refused.

Seen with 2026.4, whose CPU plugin computes in types of 32 bits at most.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import openvino
from openvino import opset13

from graphkiln_backend.graph.dtypes import AnyArray, DType
from graphkiln_backend.graph.errors import LoweringError, SignatureError
from graphkiln_backend.graph.signature import Signature

DEVICE = "CPU"
_SUPPRESSION = "NonMaxSuppression"
_OVERLAP = 3
"""Index of its input that says how far boxes may overlap."""
_NEXT = np.float32(1.5 * 2.0**-24)
"""A positive float32 and this share of it add up to the next float32: between 0.75 and 1.5 of its last bit."""
_WIDE = (DType.INT64.numpy, DType.UINT64.numpy)
_NARROW = np.iinfo(np.int32)


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
    """
    model = core.read_model(str(path))
    for operation in model.get_ordered_ops():
        if operation.get_type_name() == _SUPPRESSION and len(operation.inputs()) > _OVERLAP:
            _raise_limit(operation.input(_OVERLAP))
    return model


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


def check_values(name: str, array: AnyArray) -> None:
    """Refuses what OpenVINO would cut off: it computes integers of 64 bits in 32.

    Args:
        name: The input.
        array: Its values.

    Raises:
        SignatureError: One does not fit.
    """
    if array.dtype not in _WIDE or not array.size:
        return
    least, most = int(array.min()), int(array.max())
    if least < _NARROW.min or most > _NARROW.max:
        raise SignatureError(
            f"input '{name}' does not fit: OpenVINO computes integers in 32 bits (engine: onnxruntime takes all)",
            expected=f"{_NARROW.min} to {_NARROW.max}",
            got=f"{least} to {most}",
        )
