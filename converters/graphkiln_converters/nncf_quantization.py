"""Int8 by NNCF, OpenVINO's quantizer: an alternative for transformers, whose activations it smooths.

What it gave beside ONNX Runtime's quantizer stands in docs/precision.md. Its graphs take the same proof as all others.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import onnx

from graphkiln_backend.engines.onnxruntime.quantization import Coverage, count_integer_products
from graphkiln_backend.graph.dtypes import AnyArray
from graphkiln_backend.graph.errors import EngineUnavailable, LoweringError

_TRANSFORMER = {"LayerNormalization", "Softmax"}
"""Operators that a transformer has."""


def quantize_by_nncf(
    graph: Path, samples: Mapping[str, AnyArray], target: Path, *, exclude: Sequence[str] = (), whole: bool = False
) -> Coverage:
    """Writes a QDQ graph.

    Args:
        graph: The fp32 graph; its nodes have names.
        samples: Calibration inputs by name, `[samples, ...]`; not those that the graph is proven on.
        target: Where to write.
        exclude: Names of nodes that stay fp32.
        whole: Whether the graph has no batch: each sample is a whole input.

    Raises:
        EngineUnavailable: NNCF is not installed.
        LoweringError: NNCF cannot quantize the graph, or ONNX Runtime does not load what it wrote.
    """
    nncf = _import_nncf()
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # progress bars; stdout belongs to whoever prints JSON there
            model = onnx.load(graph)
            transformer = {node.op_type for node in model.graph.node} >= _TRANSFORMER
            quantized = nncf.quantize(
                model,
                nncf.Dataset(_split(samples, whole=whole)),
                subset_size=len(next(iter(samples.values()))),
                model_type=nncf.ModelType.TRANSFORMER if transformer else None,
                ignored_scope=nncf.IgnoredScope(names=list(exclude), validate=False) if exclude else None,
            )
            onnx.save(quantized, target)
        return count_integer_products(target)
    except Exception as error:  # the quantizer raises whatever it meets
        raise LoweringError(
            f"NNCF cannot quantize {graph}",
            attempts=(f"{type(error).__name__}: {error}",),
            hint="leave --int8-by out: ONNX Runtime's quantizer is the default",
        ) from error


def _split(samples: Mapping[str, AnyArray], *, whole: bool) -> list[dict[str, AnyArray]]:
    """The samples one by one, as the graph takes them."""
    count = len(next(iter(samples.values())))
    rows: list[Any] = [index if whole else slice(index, index + 1) for index in range(count)]
    return [{name: array[row] for name, array in samples.items()} for row in rows]


def check_nncf() -> None:
    """Says that NNCF is not installed before minutes pass; whether it can be loaded shows later.

    Raises:
        EngineUnavailable: It is not.
    """
    if find_spec("nncf") is None:
        raise EngineUnavailable("--int8-by nncf needs a library that is not installed", extra="nncf")


def _import_nncf() -> Any:
    """The library; it neither reports usage nor logs what is no error."""
    os.environ.setdefault("NNCF_CI", "1")  # without it, its use is reported. Source: nncf/telemetry/wrapper.py
    try:
        import nncf
    except ImportError as error:
        raise EngineUnavailable(
            f"--int8-by nncf needs a library that is not installed: {error}", extra="nncf"
        ) from error
    except Exception as error:  # built for another release of something else
        raise EngineUnavailable(
            f"--int8-by nncf: NNCF cannot be loaded: {type(error).__name__}: {error}",
            hint="install it anew (pip install --force-reinstall 'graphkiln[nncf]'), or leave --int8-by out",
        ) from error
    logging.getLogger("nncf").setLevel(logging.ERROR)
    return nncf
