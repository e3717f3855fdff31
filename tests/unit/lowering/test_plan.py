"""Plan of the sessions to try: engines, order, baselines and refusals."""

from __future__ import annotations

import pytest

from graphkiln_backend.engines.base import Support
from graphkiln_backend.graph.device import Device, Parallelism
from graphkiln_backend.graph.errors import LoweringError
from graphkiln_backend.graph.precision import Precision
from graphkiln_backend.lowering.plan import LoweringPlan, Resources, plan
from graphkiln_backend.lowering.settings import Choice, Settings


def resources(device: str = "cpu", cores: int = 2, instances: int = 1, missing: str = "", lacks: str = "") -> Resources:
    def probe(engine: str, _: Device) -> Support:
        return Support(ok=engine != missing, reason="not installed")

    return Resources(device=Device.parse(device), cores=cores, probe=probe, instances=instances, lacks=lambda _: lacks)


def engines(planned: LoweringPlan) -> list[str]:
    return [config.engine for config in planned.candidates]


@pytest.mark.parametrize(("available", "instances", "threads"), [(2, 1, 2), (8, 3, 2), (2, 4, 1)])
def test_instances_share_the_cores(available: int, instances: int, threads: int) -> None:
    assert plan(Settings(), resources(cores=available, instances=instances)).configs[0].threads == threads


@pytest.mark.parametrize(
    ("precision", "saved", "device", "expected"),
    [
        (None, Precision.FP32, "cpu", ["onnxruntime"]),
        (None, Precision.BF16, "cpu", ["openvino"]),
        (Precision.BF16, Precision.FP32, "cpu", ["openvino"]),
        (Precision.FP16, Precision.FP32, "cpu", ["openvino"]),
        (Precision.TF32, Precision.FP32, "gpu:0", ["onnxruntime"]),
        (Precision.FP16, Precision.FP32, "gpu:0", ["onnxruntime"]),
    ],
)
def test_default_engine_supports_the_precision(
    precision: Precision | None, saved: Precision, device: str, expected: list[str]
) -> None:
    assert engines(plan(Settings(precision=precision), resources(device), saved=saved)) == expected


def test_auto_tries_all_installed_engines() -> None:
    auto = Settings(engine="auto")
    assert engines(plan(auto, resources())) == ["onnxruntime", "openvino"]
    assert engines(plan(auto, resources("gpu:0"))) == ["onnxruntime", "tensorrt"]
    without = plan(auto, resources(missing="openvino"))
    assert engines(without) == ["onnxruntime"]
    assert without.rejected == ("openvino: not installed",)
    with pytest.raises(LoweringError, match=r"no engine can serve this graph in bf16.*not installed"):
        plan(Settings(engine="auto", precision=Precision.BF16), resources(missing="openvino"))


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
def test_impossible_requests_are_refused(settings: Settings, saved: Precision, words: str) -> None:
    with pytest.raises(LoweringError, match=words):
        plan(settings, resources(), saved=saved)


def test_unsupported_setting_is_refused() -> None:
    with pytest.raises(LoweringError, match="streams: ONNX Runtime computes a batch as a whole"):
        plan(Settings(streams=2), resources())
    with pytest.raises(LoweringError, match="layout: TensorRT chooses layouts itself"):
        plan(Settings(engine="tensorrt", layout="nhwc"), resources("gpu:0"))
    auto = plan(Settings(engine="auto", streams=2), resources())
    assert engines(auto) == ["openvino"]
    assert "onnxruntime: streams" in auto.rejected[0]


def test_providers() -> None:
    planned = plan(
        Settings(providers=("OpenVINO",), fallback=(Choice(engine="onnxruntime"),), origins={"fallback": "--set"}),
        resources(),
    )
    assert [str(config) for config in planned.configs] == ["onnxruntime with OpenVINO on cpu", "onnxruntime on cpu"]
    with pytest.raises(LoweringError, match="execution providers are ONNX Runtime's"):
        plan(Settings(engine="openvino", providers=("OpenVINO",)), resources())
    with pytest.raises(LoweringError, match="graphs for plugins cannot be cut"):
        plan(Settings(providers=("OpenVINO",), parallel=Parallelism(pipeline=2)), resources())


def test_engine_of_fp16_graphs() -> None:
    assert engines(plan(Settings(), resources(), saved=Precision.FP16)) == ["onnxruntime"]
    assert engines(plan(Settings(precision=Precision.FP16), resources(), saved=Precision.FP16)) == ["openvino"]
    assert engines(plan(Settings(engine="onnxruntime"), resources(), saved=Precision.FP16)) == ["onnxruntime"]


def test_fallbacks_come_last_in_order() -> None:
    fallback = (Choice(engine="openvino", precision=Precision.FP32), Choice(engine="onnxruntime"))
    settings = Settings(engine="openvino", precision=Precision.BF16, fallback=fallback, origins={"fallback": "--set"})
    planned = plan(settings, resources())
    assert [str(config) for config in planned.configs] == [
        "openvino on cpu in bf16",
        "openvino on cpu in fp32",
        "onnxruntime on cpu",
    ]
    assert "requested by --set" in planned.fallback[0].reason


def test_explain() -> None:
    settings = Settings(streams=2, precision=Precision.BF16, rejected=("threads 3 of x: y requests 2",))
    text = plan(settings, resources(instances=2), largest_batch=4).explain()
    assert "1. openvino on cpu in bf16, 1 threads, idle threads sleep, 2 streams: the default, 2 cores shared" in text
    assert "rejected: threads 3 of x: y requests 2" in text
    assert "rejected: onnxruntime: ONNX Runtime has no bf16 kernels for CPUs" in text
    gpu = plan(Settings(layout="nhwc", conv_search="heuristic"), resources("gpu:0")).explain()
    assert "layout nhwc, heuristic search for convolutions" in gpu
    assert gpu.endswith("\nnot yet run on a GPU: the GPU engines were built from the documentation")
    assert "not yet run" not in text


def baselines(planned: LoweringPlan) -> list[str]:
    return [str(config) for config in planned.baselines]


class TestBaselines:
    @pytest.mark.parametrize("precision", [Precision.BF16, Precision.FP16])
    def test_auto_compares_a_lower_precision_with_fp32(self, precision: Precision) -> None:
        planned = plan(Settings(engine="auto", precision=precision), resources())
        assert [str(config) for config in planned.candidates] == [f"openvino on cpu in {precision}"]
        assert baselines(planned) == ["onnxruntime on cpu in fp32", "openvino on cpu in fp32"]
        assert f"2. onnxruntime on cpu in fp32, 2 threads, idle threads spin: baseline that {precision}" in (
            planned.explain()
        )

    @pytest.mark.parametrize(
        ("settings", "device", "saved"),
        [
            (Settings(precision=Precision.BF16), "cpu", Precision.FP32),
            (Settings(engine="openvino", precision=Precision.BF16), "cpu", Precision.FP32),
            (Settings(engine="auto"), "cpu", Precision.FP32),
            (Settings(engine="auto", precision=Precision.FP32), "cpu", Precision.FP32),
            (Settings(engine="auto"), "cpu", Precision.INT8),
            (Settings(engine="auto", precision=Precision.BF16), "cpu", Precision.BF16),
            (Settings(engine="auto", precision=Precision.FP16), "gpu:0", Precision.FP32),
        ],
        ids=["no engine", "named engine", "no precision", "fp32", "int8", "saved in bf16", "GPU"],
    )
    def test_no_baselines(self, settings: Settings, device: str, saved: Precision) -> None:
        assert baselines(plan(settings, resources(device), saved=saved)) == []

    def test_unsuitable_engine_is_no_baseline(self) -> None:
        streams = Settings(engine="auto", precision=Precision.BF16, streams=2)
        assert baselines(plan(streams, resources())) == ["openvino on cpu in fp32"]

    def test_auto_skips_precisions_without_instructions(self) -> None:
        planned = plan(Settings(engine="auto", precision=Precision.BF16), resources(lacks="this CPU has none"))
        assert [str(config) for config in planned.candidates] == [
            "onnxruntime on cpu in fp32",
            "openvino on cpu in fp32",
        ]
        assert planned.baselines == ()
        assert planned.rejected[-1] == "openvino:bf16: this CPU has none, which makes it slower than fp32"
