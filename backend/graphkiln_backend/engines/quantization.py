"""Static int8 quantization by ONNX Runtime's own quantizer, and what really became integer.

Activations are QUInt8 and weights QInt8 per channel: with QInt8 activations the x86 kernels leave convolutions in
float.
"""

from __future__ import annotations

import contextlib
import io
import logging
import tempfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import onnx
import onnxruntime
from onnxruntime import quantization

from graphkiln_backend.graph.dtypes import AnyArray
from graphkiln_backend.graph.errors import LoweringError

Method = Literal["minmax", "entropy", "percentile"]

_METHODS = {
    "minmax": quantization.CalibrationMethod.MinMax,
    "entropy": quantization.CalibrationMethod.Entropy,
    "percentile": quantization.CalibrationMethod.Percentile,
}
_INTEGER = {"QLinearConv", "ConvInteger", "QLinearMatMul", "MatMulInteger", "MatMulIntegerToFloat", "QGemm"}
_FLOAT = {"Conv", "FusedConv", "MatMul", "FusedMatMul", "Gemm", "FusedGemm"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Quantization:
    """How a graph is quantized.

    Attributes:
        method: How ranges are found from the samples.
        quantize_bias: Whether biases become INT32.
        keep: Names of nodes that stay fp32.
        batch: Samples to run at once.
    """

    method: Method = "minmax"
    quantize_bias: bool = True
    keep: tuple[str, ...] = ()
    batch: int = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Coverage:
    """How many products compute with integers once the runtime has loaded the graph."""

    integer: int
    products: int

    def __str__(self) -> str:
        return f"{self.integer}/{self.products} products in int8"


def quantize(graph: Path, samples: Mapping[str, AnyArray], how: Quantization, target: Path) -> Coverage:
    """Writes a QDQ graph.

    Args:
        graph: The fp32 graph.
        samples: Real inputs by name, `[samples, ...]`; not those that the answers are proven on.
        how: Settings.
        target: Where to write.

    Raises:
        LoweringError: The graph cannot be quantized.
    """
    logging.getLogger().setLevel(max(logging.WARNING, logging.getLogger().level))
    try:
        # The histograms of the runtime talk to stdout, which belongs to whoever prints JSON there.
        with (
            tempfile.TemporaryDirectory(prefix="graphkiln-int8-") as folder,
            contextlib.redirect_stdout(io.StringIO()),
        ):
            prepared = Path(folder) / "prepared.onnx"
            quantization.quant_pre_process(str(graph), str(prepared), skip_symbolic_shape=True)
            quantization.quantize_static(
                str(prepared),
                str(target),
                _Reader(samples, how.batch),
                quant_format=quantization.QuantFormat.QDQ,
                op_types_to_quantize=None,
                per_channel=True,
                activation_type=quantization.QuantType.QUInt8,
                weight_type=quantization.QuantType.QInt8,
                nodes_to_exclude=list(how.keep),
                calibrate_method=_METHODS[how.method],
                # One batch at a time: without it every value of every layer of all samples is held at once.
                extra_options={"QuantizeBias": how.quantize_bias, "CalibStridedMinMax": 1},
            )
    except Exception as error:  # the quantizer raises whatever it meets
        raise LoweringError(f"cannot quantize {graph}", attempts=(f"{type(error).__name__}: {error}",)) from error
    return coverage(target)


def coverage(graph: Path) -> Coverage:
    """Counts the products of a graph as ONNX Runtime runs it."""
    with tempfile.TemporaryDirectory(prefix="graphkiln-int8-") as folder:
        optimized = Path(folder) / "optimised.onnx"
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
        options.optimized_model_filepath = str(optimized)
        onnxruntime.InferenceSession(str(graph), options, providers=["CPUExecutionProvider"])
        operators = Counter(node.op_type for node in onnx.load(optimized, load_external_data=False).graph.node)
    integer = sum(operators[name] for name in _INTEGER)
    return Coverage(integer=integer, products=integer + sum(operators[name] for name in _FLOAT))


class _Reader(quantization.CalibrationDataReader):  # type: ignore[misc]
    """Hands samples out in batches, some of them after each `set_range`."""

    def __init__(self, samples: Mapping[str, AnyArray], size: int) -> None:
        self._samples = samples
        self._size = size
        count = len(next(iter(samples.values())))
        self._starts = list(range(0, count - count % size or count, size))
        self._waiting = iter(self._starts)

    def __len__(self) -> int:
        return len(self._starts)

    def set_range(self, start_index: int, end_index: int) -> None:
        self._waiting = iter(self._starts[start_index:end_index])

    def get_next(self) -> dict[str, Any] | None:
        start = next(self._waiting, None)
        if start is None:
            return None
        return {name: array[start : start + self._size] for name, array in self._samples.items()}
