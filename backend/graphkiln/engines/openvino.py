"""OpenVINO: the second engine for the CPU, often the fastest one.

The one home of `import openvino`. On processors with AVX512-BF16 OpenVINO computes in bf16 unless told otherwise: the
precision is always set, and read back from the compiled model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import openvino

from graphkiln.engines.base import Placement, Step, Support
from graphkiln.graph.dtypes import AnyArray, DType
from graphkiln.graph.errors import ExecutionError, LoweringError, ManifestError
from graphkiln.graph.signature import Dim, Signature, TensorSpec, free_dim

_DEVICES = {"cpu": "CPU"}
_NOT_KERNELS = {"Parameter", "Result", "Input", "Output", "Constant", "Const", "Reorder"}
_PRECISIONS = {"f32": "fp32", "f16": "fp16", "bf16": "bf16", "f64": "fp64", "i8": "int8", "u8": "int8"}


class OpenVinoEngine:
    """OpenVINO on the CPU, in fp32."""

    def probe(self, device: str) -> Support:
        """Says yes to the CPU."""
        if device in _DEVICES:
            return Support(ok=True)
        return Support(ok=False, reason=f"openvino serves {', '.join(_DEVICES)}, not {device}")

    def build(self, graph_path: Path, step: Step) -> OpenVinoSession:
        """Compiles a graph with the step's threads.

        Raises:
            LoweringError: OpenVINO refuses the graph or an option.
        """
        try:
            core = openvino.Core()
            model = core.read_model(str(graph_path))
            compiled = core.compile_model(model, _DEVICES[step.device], _options(step))
            return OpenVinoSession(compiled)
        except (RuntimeError, ValueError, TypeError, ManifestError) as error:
            raise LoweringError(f"OpenVINO cannot load {graph_path}", attempts=(str(error),)) from error


class OpenVinoSession:
    """A compiled graph; see `engines.base.Session`."""

    def __init__(self, compiled: openvino.CompiledModel) -> None:
        self._compiled = compiled
        self._request = compiled.create_infer_request()
        self._signature = Signature(
            inputs=tuple(_spec(port) for port in compiled.inputs),
            outputs=tuple(_spec(port) for port in compiled.outputs),
        )
        self._outputs = [spec.name for spec in self._signature.outputs]
        self._bf16_outputs = {spec.name for spec in self._signature.outputs if spec.dtype is DType.BF16}

    @property
    def signature(self) -> Signature:
        """Inputs and outputs as OpenVINO sees them; it keeps no names of varying dimensions."""
        return self._signature

    def run(self, feeds: Mapping[str, AnyArray], outputs: Sequence[str] | None = None) -> dict[str, AnyArray]:
        """Computes outputs; see `engines.base.Session.run`. OpenVINO computes all and returns those asked for."""
        arrays = {name: _carried(array) for name, array in feeds.items()}
        try:
            results = self._request.infer(arrays, share_inputs=True, share_outputs=False)
        except (RuntimeError, ValueError, TypeError) as error:
            self._signature.check(feeds)  # says better than OpenVINO what is wrong with an input
            raise ExecutionError(f"OpenVINO failed: {error}") from error
        return {name: self._typed(name, results[name]) for name in (self._outputs if outputs is None else outputs)}

    def _typed(self, name: str, array: AnyArray) -> AnyArray:
        """OpenVINO hands out bf16 under the name of another type of two bytes."""
        return array.view(DType.BF16.numpy) if name in self._bf16_outputs else array

    def placement(self, feeds: Mapping[str, AnyArray]) -> Placement:
        """Runs the feeds and counts the kernels of the executed model, with the precision that each ran in."""
        self.run(feeds)
        nodes: Counter[str] = Counter()
        precisions: Counter[str] = Counter()
        for operation in self._compiled.get_runtime_model().get_ordered_ops():
            facts = operation.get_rt_info()
            if str(facts["layerType"].astype(str)) in _NOT_KERNELS:
                continue
            nodes["CPU"] += 1
            precisions[str(facts["runtimePrecision"].astype(str)).lower()] += 1
        most = precisions.most_common(1)[0][0] if precisions else "unknown"
        return Placement(nodes=dict(nodes), precision=_PRECISIONS.get(most, most))

    def close(self) -> None:
        """Drops the compiled model."""
        del self._request, self._compiled

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _options(step: Step) -> dict[str, Any]:
    """OpenVINO's properties for a step. `accelerator` holds the options that the configuration wrote, by their names.

    Raises:
        ValueError: An option asks for something that this engine does not offer.
    """
    asked = step.accelerator
    if asked.get("precision", "FP32") != "FP32":
        raise ValueError(f"precision must be FP32, got '{asked['precision']}'")
    if asked.get("device_type", "CPU") != "CPU":
        raise ValueError(f"device_type must be CPU, got '{asked['device_type']}'")
    options: dict[str, Any] = {
        "INFERENCE_PRECISION_HINT": "f32",
        "INFERENCE_NUM_THREADS": int(asked.get("num_of_threads", step.threads)),
        "NUM_STREAMS": asked.get("num_streams", "1"),
    }
    if "cache_dir" in asked:
        options["CACHE_DIR"] = asked["cache_dir"]
    return options


def _spec(port: Any) -> TensorSpec:
    return TensorSpec(
        name=port.get_any_name(),
        dtype=DType.from_openvino(port.get_element_type().get_type_name()),
        shape=tuple(_dim(dim, port.get_any_name(), axis) for axis, dim in enumerate(port.get_partial_shape())),
    )


def _carried(array: AnyArray) -> Any:
    """What OpenVINO takes for an array; of bf16 it would take the bits for another type's."""
    contiguous = np.asarray(array, order="C")  # keeps a scalar's rank
    if array.dtype != DType.BF16.numpy:
        return contiguous
    return openvino.Tensor(contiguous.view(np.uint16), contiguous.shape, openvino.Type.bf16)


def _dim(dim: Any, tensor: str, axis: int) -> Dim:
    return int(dim.get_length()) if dim.is_static else free_dim(tensor, axis)
