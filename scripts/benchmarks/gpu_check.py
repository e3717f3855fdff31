"""Throughput and memory of CUDA sessions beside eager and compiled PyTorch, host to host, in one run.

    scripts/gpu-check

Every set-up takes images from host memory, as a server does, and returns its outputs there. Set-ups take turns, and the
median round counts. Memory is the growth of device memory after a set-up has run its largest batch.

Not yet run on a GPU.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from inputs import exported_graph
from rich.console import Console
from rich.table import Table

from graphkiln_backend.cache.store import ArtifactCache
from graphkiln_backend.engines.base import Session
from graphkiln_backend.engines.hardware import identity
from graphkiln_backend.engines.registry import probe
from graphkiln_backend.graph.device import Device
from graphkiln_backend.graph.dtypes import AnyArray
from graphkiln_backend.graph.precision import Precision
from graphkiln_backend.lowering.acceptance import Requirements
from graphkiln_backend.lowering.artifacts import Artifacts
from graphkiln_backend.lowering.deployment import select_session
from graphkiln_backend.lowering.plan import Resources, plan
from graphkiln_backend.lowering.settings import Settings
from graphkiln_backend.repository.version import ModelVersion
from graphkiln_converters.recipe import Recipe
from graphkiln_converters.sources.base import open_source

_ARCHITECTURES = ("resnet101", "mobilenet_v3_large")
_BATCHES = (1, 16, 64)
_IMAGE = (3, 224, 224)
_SESSIONS = {
    "CUDA fp32": Settings(precision=Precision.FP32),
    "CUDA fp32, exhaustive": Settings(precision=Precision.FP32, conv_search="exhaustive"),
    "CUDA tf32": Settings(precision=Precision.TF32),
    "CUDA fp16": Settings(precision=Precision.FP16),
    "CUDA fp16 NHWC": Settings(precision=Precision.FP16, layout="nhwc"),
    "CUDA fp16 NHWC, graphs": Settings(
        precision=Precision.FP16, layout="nhwc", options={"onnxruntime": {"enable_cuda_graph": "1"}}
    ),
    "TensorRT fp16": Settings(engine="tensorrt", precision=Precision.FP16),
}


@dataclass(frozen=True, kw_only=True)
class Contender:
    """One implementation of the model.

    Attributes:
        name: Name of the implementation.
        run: Function of images `[batch, 3, 224, 224]` in host memory.
        memory_mb: Device memory used.
    """

    name: str
    run: Callable[[AnyArray], object]
    memory_mb: float


def session_contenders(graph: Path, cache: ArtifactCache, stack: ExitStack) -> list[Contender]:
    """Build our sessions; those that cannot be built are logged and left out."""
    version = ModelVersion(graph_path=graph, manifest=None, golden=None)
    contenders = []
    for name, settings in _SESSIONS.items():
        artifacts = Artifacts(version, Precision.FP32, cache)
        free = torch.cuda.mem_get_info()[0]
        try:
            planned = plan(settings, Resources(device=Device.gpu(), cores=8, probe=probe), largest_batch=max(_BATCHES))
            proven = select_session(artifacts, planned, Requirements(batch_sizes=_BATCHES))
        except Exception as error:  # noqa: BLE001 - one contender must not end the run
            print(f"{name}: {error}", file=sys.stderr)
            continue
        session = stack.enter_context(proven.session)
        used_mb = (free - torch.cuda.mem_get_info()[0]) / 2**20
        contenders.append(Contender(name=name, run=_session_run(session), memory_mb=used_mb))
    return contenders


def pytorch_contenders(architecture: str) -> list[Contender]:
    """Eager and compiled PyTorch, fp32 and fp16 in channels_last."""
    contenders = []
    for precision in (torch.float32, torch.float16):
        module = open_source(Recipe(source=f"torchvision:{architecture}")).module  # type: ignore[attr-defined]
        module = module.eval().to("cuda", precision, memory_format=torch.channels_last)
        for name, forward in (("eager", module), ("compiled", torch.compile(module))):
            free = torch.cuda.mem_get_info()[0]
            run = _torch_run(forward, precision)
            for batch in _BATCHES:
                run(np.zeros((batch, *_IMAGE), np.float32))
            used_mb = (free - torch.cuda.mem_get_info()[0]) / 2**20
            kind = "fp32" if precision is torch.float32 else "fp16"
            contenders.append(Contender(name=f"PyTorch {name} {kind}", run=run, memory_mb=used_mb))
    return contenders


def _session_run(session: Session) -> Callable[[AnyArray], object]:
    return lambda images: session.run({"INPUT_0": images})


def _torch_run(forward: Callable[[torch.Tensor], torch.Tensor], precision: torch.dtype) -> Callable[[AnyArray], object]:
    def run(images: AnyArray) -> object:
        with torch.inference_mode():
            batch = torch.from_numpy(images).to("cuda", precision, memory_format=torch.channels_last)
            return forward(batch).float().cpu().numpy()

    return run


def measure_images(contenders: list[Contender], rounds: int) -> list[dict[str, object]]:
    """Images per second by set-up and batch; the ratio is to eager PyTorch in fp32."""
    rates: dict[tuple[str, int], list[float]] = {}
    for _ in range(rounds):
        for batch in _BATCHES:
            images = np.random.default_rng(0).normal(size=(batch, *_IMAGE)).astype(np.float32)
            for contender in contenders:
                contender.run(images)
                runs = max(3, 128 // batch)
                begun = time.perf_counter()
                for _run in range(runs):
                    contender.run(images)
                rates.setdefault((contender.name, batch), []).append(runs * batch / (time.perf_counter() - begun))
    medians = {key: statistics.median(values) for key, values in rates.items()}
    rows: list[dict[str, object]] = []
    for contender in contenders:
        row: dict[str, object] = {"set-up": contender.name}
        for batch in _BATCHES:
            rate = medians[contender.name, batch]
            row[f"{batch}: images/s"] = round(rate)
            row[f"{batch}: ratio"] = round(rate / medians["PyTorch eager fp32", batch], 2)
        rows.append({**row, "MB": round(contender.memory_mb)})
    return rows


def main() -> None:
    """Measure and print a table for each architecture."""
    parser = argparse.ArgumentParser(
        prog="scripts/gpu-check", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5, help="interleaved rounds (default: 5)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    options = parser.parse_args()
    tables: dict[str, list[dict[str, object]]] = {}
    for architecture in _ARCHITECTURES:
        with tempfile.TemporaryDirectory() as folder, ArtifactCache(Path(folder)) as cache, ExitStack() as stack:
            contenders = [
                *pytorch_contenders(architecture),
                *session_contenders(exported_graph(architecture), cache, stack),
            ]
            tables[architecture] = measure_images(contenders, options.rounds)
    if options.json:
        print(json.dumps({"device": identity(Device.gpu()), "tables": tables}, indent=2))
        return
    for architecture, rows in tables.items():
        table = Table(title=f"{architecture} on {identity(Device.gpu())}")
        for column in rows[0]:
            table.add_column(column, justify="left" if column == "set-up" else "right")
        for row in rows:
            table.add_row(*map(str, row.values()))
        Console().print(table)


if __name__ == "__main__":
    main()
