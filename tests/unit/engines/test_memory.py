"""Memory of one request never reaches another, nor is a caller's array written to: random graphs, sizes and orders."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import openvino
import pytest
from ir_files import save_ir
from memory_graphs import Caller, RandomGraph

from graphkiln_backend.engines.base import Session, SessionConfig, SessionTuning
from graphkiln_backend.engines.onnxruntime import OnnxRuntimeEngine
from graphkiln_backend.engines.onnxruntime.session import CudaGraphRunner
from graphkiln_backend.engines.openvino import OpenVinoEngine
from graphkiln_backend.graph.device import CPU
from graphkiln_backend.graph.precision import Precision

CONFIG = SessionConfig(engine="", device=CPU, threads=1, spin=False, reason="test")
SIZES = (0, 1, 1, 2, 3, 4, 8)


def on_onnxruntime(path: Path, **changes: Any) -> Session:
    return OnnxRuntimeEngine().build(path, replace(CONFIG, engine="onnxruntime", **changes))


def on_fixed_buffers(path: Path) -> Session:
    """As with CUDA graphs; a session with bf16 has none."""
    session = OnnxRuntimeEngine().build(path, CONFIG)
    if not session._has_bf16:
        session._runner = CudaGraphRunner(session._session, device="cpu")
    return session


def on_openvino(path: Path, **changes: Any) -> Session:
    return OpenVinoEngine().build(path, replace(CONFIG, engine="openvino", **changes))


def on_openvino_compiled(path: Path) -> Session:
    folder = path.parent / "compiled"
    folder.mkdir()
    config = replace(CONFIG, engine="openvino")
    OpenVinoEngine().compile(path, config, folder)
    return OpenVinoEngine().build(path, config, folder)


def on_openvino_ir(path: Path, precision: Precision) -> Session:
    return on_openvino(save_ir(openvino.Core().read_model(path), path.with_suffix(".xml")), precision=precision)


def test_a_plugin_shares_no_memory(tmp_path: Path) -> None:
    for seed in range(8):
        graph, path = RandomGraph(seed, constants=False, computed=True), tmp_path / str(seed) / "model.onnx"
        path.parent.mkdir()
        onnx.save(graph.model(), path)
        caller = Caller(graph, seed)
        with on_onnxruntime(path, providers=("OpenVINO",)) as session:
            for rows in np.random.default_rng(seed).choice(SIZES, 10):
                caller.call(session.run, int(rows))
            caller.check()


SESSIONS: dict[str, Callable[[Path], Session]] = {
    "onnxruntime": on_onnxruntime,
    "onnxruntime as reference": OnnxRuntimeEngine().build_reference,
    "onnxruntime in parallel": partial(
        on_onnxruntime, threads=2, tuning=SessionTuning(parallel=True, memory_pattern=True)
    ),
    "onnxruntime on fixed buffers": on_fixed_buffers,
    "openvino": on_openvino,
    "openvino in streams": partial(on_openvino, threads=2, streams=2),
    "openvino compiled": on_openvino_compiled,
    "openvino ir in fp32": partial(on_openvino_ir, precision=Precision.FP32),
    "openvino ir in bf16": partial(on_openvino_ir, precision=Precision.BF16),
}


@pytest.mark.parametrize("seeds", [range(8), pytest.param(range(8, 120), marks=pytest.mark.slow)], ids=["few", "many"])
@pytest.mark.parametrize("name", SESSIONS)
def test_answers_share_no_memory(tmp_path: Path, name: str, seeds: Sequence[int]) -> None:
    for seed in seeds:
        graph, path = RandomGraph(seed), tmp_path / str(seed) / "model.onnx"
        path.parent.mkdir()
        onnx.save(graph.model(), path)
        caller = Caller(graph, seed)
        with SESSIONS[name](path) as session:
            for rows in np.random.default_rng(seed).choice(SIZES, 10):
                caller.call(session.run, int(rows))
            caller.check()
        del session
        caller.check()
