"""Which steps are tried, in which order, and what is refused before anything is built."""

from __future__ import annotations

import pytest

from graphkiln_backend.engines.base import Support
from graphkiln_backend.graph.device import Device
from graphkiln_backend.graph.errors import LoweringError
from graphkiln_backend.graph.precision import Precision
from graphkiln_backend.lowering.plan import LoweringPlan, Resources, pick_fastest, plan
from graphkiln_backend.lowering.settings import Choice, Settings


def machine(device: str = "cpu", cores: int = 2, instances: int = 1, missing: str = "") -> Resources:
    def probe(engine: str, _: Device) -> Support:
        return Support(ok=engine != missing, reason="not installed")

    return Resources(device=Device.parse(device), cores=cores, probe=probe, instances=instances)


def engines(planned: LoweringPlan) -> list[str]:
    return [config.engine for config in planned.candidates]


@pytest.mark.parametrize(("available", "instances", "threads"), [(2, 1, 2), (8, 3, 2), (2, 4, 1)])
def test_shares_the_cores(available: int, instances: int, threads: int) -> None:
    assert plan(Settings(), machine(cores=available, instances=instances)).configs[0].threads == threads


@pytest.mark.parametrize(
    ("precision", "saved", "device", "expected"),
    [
        (None, Precision.FP32, "cpu", ["onnxruntime"]),
        (None, Precision.INT8, "cpu", ["onnxruntime"]),
        (None, Precision.BF16, "cpu", ["openvino"]),
        (Precision.BF16, Precision.FP32, "cpu", ["openvino"]),
        (Precision.BF16, Precision.BF16, "cpu", ["openvino"]),
        (Precision.FP16, Precision.FP32, "cpu", ["openvino"]),
        (Precision.TF32, Precision.FP32, "gpu:0", ["onnxruntime"]),
        (Precision.FP16, Precision.FP32, "gpu:0", ["onnxruntime"]),
    ],
)
def test_the_default_engine_is_one_that_can_compute_in_the_precision(
    precision: Precision | None, saved: Precision, device: str, expected: list[str]
) -> None:
    assert engines(plan(Settings(precision=precision), machine(device), saved=saved)) == expected


def test_auto_tries_all_that_are_there() -> None:
    auto = Settings(engine="auto")
    assert engines(plan(auto, machine())) == ["onnxruntime", "openvino"]
    assert engines(plan(auto, machine("gpu:0"))) == ["onnxruntime", "tensorrt"]
    without = plan(auto, machine(missing="openvino"))
    assert engines(without) == ["onnxruntime"]
    assert without.rejected == ("openvino: not installed",)
    with pytest.raises(LoweringError, match=r"no engine can serve this graph in bf16.*not installed"):
        plan(Settings(engine="auto", precision=Precision.BF16), machine(missing="openvino"))


@pytest.mark.parametrize(
    ("settings", "saved", "words"),
    [
        (Settings(precision=Precision.INT8), Precision.FP32, "int8 needs samples to calibrate on"),
        (Settings(precision=Precision.TF32), Precision.FP32, "tf32 is for NVIDIA GPUs"),
        (Settings(precision=Precision.FP32), Precision.INT8, "saved in int8, which loading does not change"),
        (Settings(precision=Precision.BF16, engine="onnxruntime"), Precision.FP32, "no bf16 kernels for CPUs"),
        (Settings(engine="onnxruntime"), Precision.BF16, "no bf16 kernels for CPUs"),
        (
            Settings(precision=Precision.FP16, engine="onnxruntime"),
            Precision.FP32,
            "computes fp16 graphs in fp32.*precision: bf16",
        ),
        (
            Settings(fallback=(Choice(engine="onnxruntime", precision=Precision.BF16),), origins={"fallback": "--set"}),
            Precision.FP32,
            "onnxruntime:bf16 cannot serve this graph",
        ),
    ],
)
def test_what_no_build_could_make_true_is_refused(settings: Settings, saved: Precision, words: str) -> None:
    with pytest.raises(LoweringError, match=words):
        plan(settings, machine(), saved=saved)


def test_a_setting_that_an_engine_has_no_use_for_is_refused() -> None:
    with pytest.raises(LoweringError, match="streams: ONNX Runtime computes a batch as a whole"):
        plan(Settings(streams=2), machine())
    with pytest.raises(LoweringError, match="layout: TensorRT chooses layouts itself"):
        plan(Settings(engine="tensorrt", layout="nhwc"), machine("gpu:0"))
    auto = plan(Settings(engine="auto", streams=2), machine())
    assert engines(auto) == ["openvino"]
    assert "onnxruntime: streams" in auto.rejected[0]


def test_fp16_graphs_are_served_by_onnx_runtime_unless_fp16_is_asked_for() -> None:
    assert engines(plan(Settings(), machine(), saved=Precision.FP16)) == ["onnxruntime"]
    assert engines(plan(Settings(precision=Precision.FP16), machine(), saved=Precision.FP16)) == ["openvino"]
    assert engines(plan(Settings(engine="onnxruntime"), machine(), saved=Precision.FP16)) == ["onnxruntime"]


def test_fallbacks_come_last_in_the_users_order() -> None:
    fallback = (Choice(engine="openvino", precision=Precision.FP32), Choice(engine="onnxruntime"))
    settings = Settings(engine="openvino", precision=Precision.BF16, fallback=fallback, origins={"fallback": "--set"})
    planned = plan(settings, machine())
    assert [str(config) for config in planned.configs] == [
        "openvino on cpu in bf16",
        "openvino on cpu in fp32",
        "onnxruntime on cpu",
    ]
    assert "requested by --set" in planned.fallback[0].reason


def test_explains_itself() -> None:
    settings = Settings(streams=2, precision=Precision.BF16, rejected=("threads 3 of x: y requests 2",))
    text = plan(settings, machine(instances=2)).explain()
    assert "1. openvino on cpu in bf16, 1 threads, idle threads sleep, 2 streams: the default, 2 cores shared" in text
    assert "rejected: threads 3 of x: y requests 2" in text
    assert "rejected: onnxruntime: ONNX Runtime has no bf16 kernels for CPUs" in text
    gpu = plan(Settings(layout="nhwc", conv_search="heuristic"), machine("gpu:0")).explain()
    assert "layout nhwc, heuristic search for convolutions" in gpu


@pytest.mark.parametrize(("times_s", "index"), [([1.0, 0.5], 1), ([1.0, 0.98], 0), ([0.5, 1.0, 0.4], 2)])
def test_the_fastest_wins_and_noise_does_not(times_s: list[float], index: int) -> None:
    assert pick_fastest(times_s) == index
