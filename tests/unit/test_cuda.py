"""What the CUDA side does before and around a GPU: provider options, the GPUs of a machine, runs on fixed buffers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnxruntime
import pytest

from graphkiln_backend.engines import hardware
from graphkiln_backend.engines.base import SessionConfig
from graphkiln_backend.engines.cuda_graphs import CapturedRuns
from graphkiln_backend.engines.onnxruntime import CPU, CUDA, OnnxRuntimeEngine, cpu_or_cuda
from graphkiln_backend.engines.profile import read_placement
from graphkiln_backend.graph.device import CPU as ON_CPU
from graphkiln_backend.graph.device import Device
from graphkiln_backend.graph.errors import EngineUnavailable
from graphkiln_backend.graph.precision import Precision
from graphkiln_backend.lowering.setting_keys import CUDA_KEYS

STEP = SessionConfig(engine="onnxruntime", device=Device.gpu(1), threads=1, spin=False, reason="test")


class TestProvider:
    def test_fp32_is_fp32_unless_tf32_is_asked_for(self) -> None:
        assert cpu_or_cuda(STEP) == (CUDA, {"device_id": "1", "use_tf32": "0"})
        assert cpu_or_cuda(replace(STEP, precision=Precision.TF32))[1]["use_tf32"] == "1"

    def test_layout_search_and_the_users_own_options(self) -> None:
        step = replace(STEP, layout="nhwc", conv_search="heuristic", options={"gpu_mem_limit": "5", "use_tf32": "1"})
        assert cpu_or_cuda(step)[1] == {
            "device_id": "1",
            "use_tf32": "1",
            "prefer_nhwc": "1",
            "cudnn_conv_algo_search": "HEURISTIC",
            "gpu_mem_limit": "5",
        }

    def test_every_option_is_one_that_the_provider_knows(self) -> None:
        known = Path(__file__).with_name("cuda_options.txt").read_text().split("\n\n")[1].split()
        every = replace(STEP, precision=Precision.TF32, layout="nhwc", conv_search="exhaustive")
        assert {*cpu_or_cuda(every)[1], *CUDA_KEYS, "enable_cuda_graph"} <= set(known)

    def test_a_cpu_has_none_of_it(self) -> None:
        assert cpu_or_cuda(replace(STEP, device=ON_CPU)) == (CPU, {})

    def test_a_build_without_cuda_names_the_package(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: [CPU])
        support = OnnxRuntimeEngine().probe(Device.gpu(0))
        assert not support.ok
        assert "pip install 'graphkiln[gpu]'" in support.reason


def kernel(name: str, operator: str, provider: str) -> dict[str, object]:
    arguments = {"op_name": operator, "provider": provider, "input_type_shape": [{"float": [1]}]}
    return {"name": f"{name}_kernel_time", "dur": 1, "args": arguments}


def test_products_on_the_cpu_are_told_from_shapes_on_the_cpu() -> None:
    kernels = [kernel("conv", "Conv", CUDA), kernel("shape", "Gather", CPU), kernel("fc", "MatMul", CPU)]
    found = read_placement(kernels, CUDA, {})
    assert found.nodes == {CUDA: 1, CPU: 2}
    assert found.products == {"fp32": 2}
    assert found.elsewhere == ("fc",)


def test_products_inside_a_fused_kernel_are_those_of_the_graph_that_ran_nowhere_else() -> None:
    kernels = [kernel("TRTKernel_graph_0", "TRTKernel_graph_0", "TensorrtExecutionProvider"), kernel("a", "Conv", CUDA)]
    found = read_placement(kernels, "TensorrtExecutionProvider", {"fp32": 5})
    assert found.products == {"fp32": 4}
    assert found.elsewhere == ("a",)
    nothing = read_placement(kernels[1:], "TensorrtExecutionProvider", {"fp16": 5})
    assert nothing.products == {"fp32": 1}


class TestGpus:
    @pytest.fixture(autouse=True)
    def _forget(self) -> Iterator[None]:
        hardware.gpus.cache_clear()
        yield
        hardware.gpus.cache_clear()

    def test_are_read_from_the_driver(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        program = tmp_path / "nvidia-smi"
        program.write_text("#!/bin/sh\necho 'NVIDIA H100 80GB HBM3, 9.0, 580.65.06'\n")
        program.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path))
        assert hardware.identity(Device.gpu(0)) == "NVIDIA H100 80GB HBM3, compute capability 9.0, driver 580.65.06"
        with pytest.raises(
            EngineUnavailable, match=r"there is no GPU 1 here; GPUs: gpu:0 \(NVIDIA H100.*instance_group"
        ):
            hardware.gpu(Device.gpu(1))

    @pytest.mark.parametrize("text", ["", "#!/bin/sh\nexit 9\n"])
    def test_a_machine_without_a_driver_has_none(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
    ) -> None:
        if text:
            (tmp_path / "nvidia-smi").write_text(text)
            (tmp_path / "nvidia-smi").chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}")
        assert hardware.gpus() == ()
        with pytest.raises(EngineUnavailable, match="GPUs: none"):
            hardware.identity(Device.gpu(0))


class TestCapturedRuns:
    """On the CPU's buffers: the bookkeeping is the same."""

    @pytest.fixture
    def session(self, digits: Path) -> onnxruntime.InferenceSession:
        return onnxruntime.InferenceSession(str(digits / "1" / "model.onnx"), providers=[CPU])

    def test_answers_are_those_of_plain_runs(self, session: onnxruntime.InferenceSession) -> None:
        runs = CapturedRuns(session, "cpu")
        generator = np.random.default_rng(2)
        kept = []
        for rows in (1, 4, 1, 4, 1):
            feeds = {"INPUT_0": generator.normal(size=(rows, 1, 32, 32)).astype(np.float32)}
            answers = runs.run(feeds, ["OUTPUT_0"])["OUTPUT_0"]
            np.testing.assert_allclose(answers, session.run(None, feeds)[0], rtol=1e-6)
            kept.append((answers, answers.copy()))
        for answers, copy in kept:  # later runs do not write into earlier answers
            np.testing.assert_array_equal(answers, copy)

    def test_many_shapes_do_not_hold_many_buffers(
        self, session: onnxruntime.InferenceSession, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("graphkiln_backend.engines.cuda_graphs._MOST_RECORDINGS", 2)
        runs = CapturedRuns(session, "cpu")
        for rows in (1, 2, 3, 4, 3):
            answers = runs.run({"INPUT_0": np.zeros((rows, 1, 32, 32), np.float32)}, ["OUTPUT_0"])
            assert len(answers["OUTPUT_0"]) == rows
        assert len(runs._recordings) == 2
