"""Another backend of Triton, for tests: versions of its own Python backend, with golden samples of y = 2x.

Every behaviour is a few lines of a `model.py`. A killed process stands for a backend that crashes.
"""

from __future__ import annotations

import textwrap
from pathlib import Path

import numpy as np

from graphkiln_backend.graph.dtypes import AnyArray, DType
from graphkiln_backend.graph.golden import GoldenSamples
from graphkiln_backend.graph.manifest import (
    FORMAT_VERSION,
    MANIFEST_FILE,
    Adoption,
    Golden,
    Manifest,
    Provenance,
    sha256_of,
)
from graphkiln_backend.graph.precision import Precision
from graphkiln_backend.graph.signature import Signature, TensorSpec
from graphkiln_backend.repository.version import GOLDEN_FILE

WIDTH = 3
CONFIG = """backend: "python"
max_batch_size: 8
input { name: "x" data_type: TYPE_FP32 dims: [3] }
output { name: "y" data_type: TYPE_FP32 dims: [3] }
dynamic_batching {}
"""
TWO_INSTANCES = "instance_group { kind: KIND_CPU count: 2 }"

RIGHT = "y = x * 2"
# What a request meets in place of `RIGHT`.
FAULTY_RUNS = {
    "wrong": "y = x * 2.01",
    "wrong in a batch": "y = x * (2 if len(x) == 1 else 2.01)",
    "constant": "y = x * 0 + 1",
    "nan": "y = x * float('nan')",
    "other shape": "y = (x * 2)[:, :2]",
    "other dtype": "y = (x * 2).astype(np.float64)",
    "rows swapped": "y = (x * 2)[::-1]",
    "raises": "raise ValueError('cannot compute this')",
    "instance dies": "os._exit(3)",
    "server dies": "os.kill(os.getppid(), signal.SIGKILL)",
}
# What a load meets.
FAULTY_LOADS = {
    "raises at load": "raise RuntimeError('cannot load this')",
    "dies at load": "os._exit(3)",
}
HANGS = "time.sleep(3600)"
SLOW = f"time.sleep(0.3); {RIGHT}"

_MODEL = """import os
import signal
import time

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
{load}

    def execute(self, requests):
        xs = [pb_utils.get_input_tensor_by_name(request, "x").as_numpy() for request in requests]
        x = np.concatenate(xs)
{run}
        y = y if y.dtype == np.float64 else y.astype(np.float32)
        parts = np.split(y, np.cumsum([len(x) for x in xs])[:-1])
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", part)]) for part in parts]
"""


def write_model(folder: Path, *, run: str = RIGHT, load: str = "pass") -> None:
    """Write the code of a version.

    Args:
        folder: The version folder.
        run: Lines that compute `y` from `x`, a batch.
        load: Lines that run once, before the first request.
    """
    code = _MODEL.format(run=textwrap.indent(run, " " * 8), load=textwrap.indent(load, " " * 8))
    (folder / "model.py").write_text(code)


def adopt(folder: Path, golden: GoldenSamples, signature: Signature) -> None:
    """Give the version whose code is in a folder golden samples and a manifest, as `graphkiln adopt` does."""
    golden.write(folder / GOLDEN_FILE)
    Manifest(
        format_version=FORMAT_VERSION,
        graph_file="model.py",
        sha256=sha256_of(folder / "model.py"),
        signature=signature,
        preprocess=None,
        labels=None,
        provenance=Provenance(source="test", command=""),
        verification=(),
        golden=Golden(file=GOLDEN_FILE, sha256=sha256_of(folder / GOLDEN_FILE), samples=golden.count),
        adoption=Adoption(reference="a test", precision=Precision.FP32),
    ).write(folder / MANIFEST_FILE)


def doubled(samples: int = 4) -> GoldenSamples:
    """Golden samples of y = 2x."""
    x = np.random.default_rng(0).normal(size=(samples, WIDTH)).astype(np.float32)
    return golden_of({"x": x}, {"y": x * 2})


def golden_of(inputs: dict[str, AnyArray], outputs: dict[str, AnyArray], *, whole: bool = False) -> GoldenSamples:
    """Golden samples whose two references are equal."""
    return GoldenSamples(inputs=inputs, source_outputs=outputs, graph_outputs=outputs, whole=whole)


def signature_of(golden: GoldenSamples, *, batched: bool = True) -> Signature:
    """The signature of a graph with these inputs and outputs."""

    def specs(tensors: dict[str, AnyArray]) -> tuple[TensorSpec, ...]:
        return tuple(
            TensorSpec(
                name=name,
                dtype=DType.from_numpy(array.dtype),
                shape=("batch", *array.shape[1:]) if batched else array.shape,
            )
            for name, array in tensors.items()
        )

    return Signature(inputs=specs(dict(golden.inputs)), outputs=specs(dict(golden.graph_outputs)))


def add(
    store: Path,
    name: str,
    version: int = 1,
    *,
    run: str = RIGHT,
    load: str = "pass",
    config: str = CONFIG,
    golden: GoldenSamples | None = None,
    proven: bool = True,
) -> Path:
    """Add a version to a store, and return its folder.

    Args:
        store: The store.
        name: Model name.
        version: Version number.
        run: See `write_model`.
        load: See `write_model`.
        config: config.pbtxt of a new model.
        golden: Golden samples; by default `doubled`.
        proven: Whether it has golden samples.
    """
    folder = store / name / str(version)
    folder.mkdir(parents=True)
    write_model(folder, run=run, load=load)
    if not (store / name / "config.pbtxt").exists():
        (store / name / "config.pbtxt").write_text(config)
    if proven:
        golden = golden or doubled()
        adopt(folder, golden, signature_of(golden))
    return folder


def publish(store: Path, name: str, version: int, **options: object) -> Path:
    """Add a version to a store that is served: all of its files appear at once."""
    folder = add(store.with_name(f"{store.name}-being-written"), name, version, **options)  # type: ignore[arg-type]
    (store / name).mkdir(exist_ok=True)
    target = store / name / str(version)
    if not (store / name / "config.pbtxt").exists():
        (folder.parent / "config.pbtxt").rename(store / name / "config.pbtxt")
    folder.rename(target)
    return target
