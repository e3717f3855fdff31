"""Static int8 quantization by ONNX Runtime's quantizer, and the share of products that became integer.

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
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnx
from onnxruntime import quantization

from graphkiln_backend.engines.base import SessionConfig
from graphkiln_backend.engines.onnxruntime.loading import CPU, open_session, session_options
from graphkiln_backend.graph.device import CPU as CPU_DEVICE
from graphkiln_backend.graph.dtypes import AnyArray
from graphkiln_backend.graph.errors import LoweringError

# Operators whose bias the quantizer quantizes. Source: its `operators` that call `quantize_bias_tensor`.
_BIASED = ("Conv", "ConvTranspose", "Gemm", "InstanceNormalization", "LayerNormalization")
_BIAS = 2  # index of the bias among their inputs
CalibrationMethod = Literal["minmax", "entropy", "percentile"]
_METHODS = {
    "minmax": quantization.CalibrationMethod.MinMax,
    "entropy": quantization.CalibrationMethod.Entropy,
    "percentile": quantization.CalibrationMethod.Percentile,
}
_INTEGER = {"QLinearConv", "ConvInteger", "QLinearMatMul", "MatMulInteger", "MatMulIntegerToFloat", "QGemm"}
_FLOAT = {"Conv", "FusedConv", "MatMul", "FusedMatMul", "Gemm", "FusedGemm"}
_QUANTIZER = logging.getLogger("onnxruntime.quantization")
_QUIET = threading.Lock()  # held while stdout of the process is redirected


def separate_biases(graph: onnx.GraphProto) -> None:
    """Give each node its own bias, since ONNX Runtime's quantizer (1.32) gives copies of a shared one colliding names.

    It appends the first number for which no initializer has the name: for `val_6` up to `val_698` that is `val_699`,
    which may be the output of a node. PyTorch's exporter names values so, and stores equal biases once.
    Source: `QDQQuantizer._dup_initializer`.
    """
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
        samples: Calibration inputs by name, `[samples, ...]`; disjoint from the samples of the proof.
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
                # One batch at a time: otherwise all values of all layers of all samples are in memory at once.
                extra_options={"QuantizeBias": settings.quantize_bias, "CalibStridedMinMax": 1},
            )
        return count_integer_products(target)
    except Exception as error:  # the quantizer raises many types, and may write invalid graphs
        raise LoweringError(f"cannot quantize {graph}", attempts=(f"{type(error).__name__}: {error}",)) from error


def count_integer_products(graph: Path) -> Coverage:
    """Count the products of a graph as ONNX Runtime runs it."""
    with tempfile.TemporaryDirectory(prefix="graphkiln-int8-") as folder:
        optimized = Path(folder) / "optimized.onnx"
        config = SessionConfig(
            engine="onnxruntime", device=CPU_DEVICE, threads=1, spin=False, reason="to count products"
        )
        options = session_options(replace(config, tuning=replace(config.tuning, graph_level="extended")))
        options.optimized_model_filepath = str(optimized)
        open_session(graph, options, [(CPU, {})])
        operators = Counter(node.op_type for node in onnx.load(optimized, load_external_data=False).graph.node)
    integer = sum(operators[name] for name in _INTEGER)
    return Coverage(integer=integer, products=integer + sum(operators[name] for name in _FLOAT))


class _CalibrationReader(quantization.CalibrationDataReader):  # type: ignore[misc]
    """Calibration samples in batches; `set_range` selects the next ones."""

    def __init__(self, samples: Mapping[str, AnyArray], batch_size: int, *, whole: bool = False) -> None:
        self._samples = samples
        self._whole = whole
        self._batch_size = batch_size = 1 if whole else batch_size
        count = len(next(iter(samples.values())))
        # Whole batches only, unless there are fewer samples than one batch.
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
    """Replacement of the module `logging` that sends records for the root logger to the quantizer's logger."""

    def __getattr__(self, name: str) -> Any:
        logs = name in {"debug", "info", "warning", "error", "exception", "critical", "log"}
        return getattr(_QUANTIZER if logs else logging, name)


@contextlib.contextmanager
def _silenced() -> Iterator[None]:
    """Suppress the quantizer's output on stdout, where the process may print JSON, and in the log, except warnings.

    Its modules print, and log a line per tensor with `logging.info`, which uses the root logger.
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
