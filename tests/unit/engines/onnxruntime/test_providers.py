"""Which execution provider a configuration asks for, with which options, and whether it can run here."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import onnxruntime
import pytest

from graphkiln_backend.engines.base import SessionConfig
from graphkiln_backend.engines.onnxruntime import OnnxRuntimeEngine
from graphkiln_backend.engines.onnxruntime.loading import CPU, CUDA, select_provider
from graphkiln_backend.graph.device import Device
from graphkiln_backend.graph.precision import Precision
from graphkiln_backend.lowering.settings import CUDA_KEYS

CONFIG = SessionConfig(engine="onnxruntime", device=Device.gpu(1), threads=1, spin=False, reason="test")


class TestProvider:
    def test_layout_search_and_the_users_own_options(self) -> None:
        config = replace(
            CONFIG, layout="nhwc", conv_search="heuristic", options={"gpu_mem_limit": "5", "use_tf32": "1"}
        )
        assert select_provider(config)[1] == {
            "device_id": "1",
            "use_tf32": "1",
            "prefer_nhwc": "1",
            "cudnn_conv_algo_search": "HEURISTIC",
            "gpu_mem_limit": "5",
        }

    def test_every_option_is_one_that_the_provider_knows(self) -> None:
        known = Path(__file__).with_name("cuda_options.txt").read_text().split("\n\n")[1].split()
        every = replace(CONFIG, precision=Precision.TF32, layout="nhwc", conv_search="exhaustive")
        assert {*select_provider(every)[1], *CUDA_KEYS, "enable_cuda_graph"} <= set(known)

    def test_a_build_without_cuda_names_the_package(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: [CPU])
        support = OnnxRuntimeEngine().probe(Device.gpu(0))
        assert not support.ok
        assert "pip install 'graphkiln[gpu]'" in support.reason


class TestProbe:
    def test_a_gpu_that_is_not_there_names_those_that_are(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: [CUDA, CPU])
        monkeypatch.setattr("graphkiln_backend.engines.hardware.gpus", lambda: ())
        support = OnnxRuntimeEngine().probe(Device.gpu(1))
        assert not support.ok
        assert "there is no GPU 1 here; GPUs: none" in support.reason
