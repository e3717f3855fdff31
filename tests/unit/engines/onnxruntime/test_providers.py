"""Which execution provider a configuration asks for, with which options, and whether it can run here."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import onnxruntime
import pytest

from graphkiln_backend.engines.base import SessionConfig
from graphkiln_backend.engines.hardware import Gpu
from graphkiln_backend.engines.onnxruntime import OnnxRuntimeEngine, loading
from graphkiln_backend.engines.onnxruntime.loading import CPU, CUDA, probe_gpu, select_provider
from graphkiln_backend.graph.device import CPU as ON_CPU
from graphkiln_backend.graph.device import Device
from graphkiln_backend.graph.precision import Precision
from graphkiln_backend.lowering.settings import CUDA_KEYS

CONFIG = SessionConfig(engine="onnxruntime", device=Device.gpu(1), threads=1, spin=False, reason="test")


class TestProvider:
    def test_fp32_is_fp32_unless_tf32_is_asked_for(self) -> None:
        assert select_provider(CONFIG) == (CUDA, {"device_id": "1", "use_tf32": "0"})
        assert select_provider(replace(CONFIG, precision=Precision.TF32))[1]["use_tf32"] == "1"

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

    def test_a_cpu_has_none_of_it(self) -> None:
        assert select_provider(replace(CONFIG, device=ON_CPU)) == (CPU, {})

    def test_a_build_without_cuda_names_the_package(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: [CPU])
        support = OnnxRuntimeEngine().probe(Device.gpu(0))
        assert not support.ok
        assert "pip install 'graphkiln[gpu]'" in support.reason

    def test_only_what_is_requested_is_set(self) -> None:
        config = replace(CONFIG, device=Device.gpu(0), layout="nchw", conv_search="")
        assert set(select_provider(config)[1]) == {"device_id", "use_tf32"}

    @pytest.mark.parametrize("precision", [None, *sorted(set(Precision) - {Precision.TF32})])
    def test_every_other_precision_leaves_tf32_off(self, precision: Precision | None) -> None:
        """CUDA's own default is on: fp32 would silently have ten bits."""
        assert select_provider(replace(CONFIG, precision=precision))[1]["use_tf32"] == "0"

    def test_each_call_gives_options_of_its_own(self) -> None:
        select_provider(CONFIG)[1]["device_id"] = "9"
        assert select_provider(CONFIG)[1]["device_id"] == "1"


class TestProbe:
    def test_a_gpu_that_is_there(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: [CUDA, CPU])
        monkeypatch.setattr(loading, "gpu", lambda _: Gpu(name="g", compute_capability="9.0", driver="1"))
        assert OnnxRuntimeEngine().probe(Device.gpu(1)).ok

    def test_a_gpu_that_is_not_there_names_those_that_are(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: [CUDA, CPU])
        monkeypatch.setattr("graphkiln_backend.engines.hardware.gpus", lambda: ())
        support = OnnxRuntimeEngine().probe(Device.gpu(1))
        assert not support.ok
        assert "there is no GPU 1 here; GPUs: none" in support.reason

    def test_the_missing_provider_is_named(self) -> None:
        assert "has no NonesuchExecutionProvider" in probe_gpu("NonesuchExecutionProvider", Device.gpu(0)).reason
