"""Static int8 quantization by ONNX Runtime's own quantizer, and how much of the graph became integer.

Activations are QUInt8 and weights QInt8 per channel: with QInt8 activations the x86 kernels leave convolutions in
float.
"""

from __future__ import annotations

import contextlib
import io
import logging
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnx
import onnxruntime
from onnxruntime import quantization

from graphkiln_backend.engines.onnxruntime.loading import CPU
from graphkiln_backend.graph.dtypes import AnyArray
from graphkiln_backend.graph.errors import LoweringError

# Each node gets its own bias before ONNX Runtime's quantizer (1.32) copies it: that names the copies badly.
#
# It appends a number to the name, the first that no initializer has: of `val_6` and up to `val_698` that is `val_699`,
# which may be what a node computes. Exporters name values so, and equal biases are one initializer.
# Source: `QDQQuantizer._dup_initializer`.

# Whose bias it quantizes. Source: its `operators`, who calls `quantize_bias_tensor`.
_BIASED = ("Conv", "ConvTranspose", "Gemm", "InstanceNormalization", "LayerNormalization")
_BIAS = 2  # place of the bias among their inputs


def separate_biases(graph: onnx.GraphProto) -> None:
    """Copy initializers until no two nodes read the same one as their bias."""
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


CalibrationMethod = Literal["minmax", "entropy", "percentile"]

_METHODS = {
    "minmax": quantization.CalibrationMethod.MinMax,
    "entropy": quantization.CalibrationMethod.Entropy,
    "percentile": quantization.CalibrationMethod.Percentile,
}
_INTEGER = {"QLinearConv", "ConvInteger", "QLinearMatMul", "MatMulInteger", "MatMulIntegerToFloat", "QGemm"}
_FLOAT = {"Conv", "FusedConv", "MatMul", "FusedMatMul", "Gemm", "FusedGemm"}
_QUANTIZER = logging.getLogger("onnxruntime.quantization")
_QUIET = threading.Lock()  # held while the quantizer is silenced: stdout is the process's


@dataclass(frozen=True, kw_only=True, slots=True)
class Quantization:
    """Options of a quantization.

    Attributes:
        method: Method of finding ranges from the calibration samples.
        quantize_bias: Whether biases become INT32.
        exclude: Names of nodes that stay fp32.
        batch_size: Calibration samples to run at once.
        whole: Whether the graph has no batch: each sample is a whole input.
    """

    method: CalibrationMethod = "minmax"
    quantize_bias: bool = True
    exclude: tuple[str, ...] = ()
    batch_size: int = 8
    whole: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Coverage:
    """Number of products that compute with integers once the runtime has loaded the graph."""

    integer: int
    products: int

    def __str__(self) -> str:
        return f"{self.integer}/{self.products} products in int8"


def quantize(graph: Path, samples: Mapping[str, AnyArray], settings: Quantization, target: Path) -> Coverage:
    """Write a QDQ graph.

    Args:
        graph: The fp32 graph.
        samples: Calibration inputs by name, `[samples, ...]`; not those that the graph is proven on.
        settings: Options.
        target: File to write.

    Raises:
        LoweringError: The graph cannot be quantized.
    """
    try:
        with tempfile.TemporaryDirectory(prefix="graphkiln-int8-") as folder, _silenced():
            prepared = Path(folder) / "prepared.onnx"
            quantization.quant_pre_process(str(graph), str(prepared), skip_symbolic_shape=True)
            model = onnx.load(prepared)
            separate_biases(model.graph)
            onnx.save(model, prepared)
            quantization.quantize_static(
                str(prepared),
                str(target),
                _CalibrationReader(samples, settings.batch_size, whole=settings.whole),
                quant_format=quantization.QuantFormat.QDQ,
                op_types_to_quantize=None,
                per_channel=True,
                activation_type=quantization.QuantType.QUInt8,
                weight_type=quantization.QuantType.QInt8,
                nodes_to_exclude=list(settings.exclude),
                calibrate_method=_METHODS[settings.method],
                # One batch at a time: without it every value of every layer of all samples is held at once.
                extra_options={"QuantizeBias": settings.quantize_bias, "CalibStridedMinMax": 1},
            )
        return count_integer_products(target)
    except Exception as error:  # the quantizer raises whatever it meets, and writes graphs that are not valid
        raise LoweringError(f"cannot quantize {graph}", attempts=(f"{type(error).__name__}: {error}",)) from error


def count_integer_products(graph: Path) -> Coverage:
    """Count the products of a graph as ONNX Runtime runs it."""
    with tempfile.TemporaryDirectory(prefix="graphkiln-int8-") as folder:
        optimized = Path(folder) / "optimized.onnx"
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
        options.optimized_model_filepath = str(optimized)
        onnxruntime.InferenceSession(str(graph), options, providers=[CPU])
        operators = Counter(node.op_type for node in onnx.load(optimized, load_external_data=False).graph.node)
    integer = sum(operators[name] for name in _INTEGER)
    return Coverage(integer=integer, products=integer + sum(operators[name] for name in _FLOAT))


class _CalibrationReader(quantization.CalibrationDataReader):  # type: ignore[misc]
    """Calibration samples in batches, some of them after each `set_range`."""

    def __init__(self, samples: Mapping[str, AnyArray], batch_size: int, *, whole: bool = False) -> None:
        self._samples = samples
        self._whole = whole
        self._batch_size = batch_size = 1 if whole else batch_size
        count = len(next(iter(samples.values())))
        self._starts = list(range(0, count - count % batch_size or count, batch_size))
        self._remaining = iter(self._starts)

    def __len__(self) -> int:
        return len(self._starts)

    def set_range(self, start_index: int, end_index: int) -> None:
        self._remaining = iter(self._starts[start_index:end_index])

    def get_next(self) -> dict[str, Any] | None:
        start = next(self._remaining, None)
        if start is None:
            return None
        rows = start if self._whole else slice(start, start + self._batch_size)
        return {name: np.asarray(array[rows]) for name, array in self._samples.items()}


class _QuantizerLogging:
    """Stands in for the module `logging`: what would go to the root logger goes to the quantizer's own."""

    def __getattr__(self, name: str) -> Any:
        own = name in {"debug", "info", "warning", "error", "exception", "critical", "log"}
        return getattr(_QUANTIZER if own else logging, name)


@contextlib.contextmanager
def _silenced() -> Iterator[None]:
    """Keep the quantizer's chatter from stdout, where the process may print JSON, and from the log.

    Its modules print, and log a line per tensor with `logging.info`: to the root logger, which is not ours to
    configure. Warnings still pass.
    """
    with _QUIET, contextlib.redirect_stdout(io.StringIO()):
        own = [module for name, module in sys.modules.items() if name.startswith("onnxruntime.quantization.")]
        using_root = [module for module in own if getattr(module, "logging", None) is logging]
        level = _QUANTIZER.level
        _QUANTIZER.setLevel(logging.WARNING)
        for module in using_root:
            vars(module)["logging"] = _QuantizerLogging()
        try:
            yield
        finally:
            for module in using_root:
                vars(module)["logging"] = logging
            _QUANTIZER.setLevel(level)
