"""What int8 brings on the machine that converts is measured, and told where it is slower than fp32."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from graphs import compute, draw, graph

from graphkiln_backend.engines.hardware import cpu_name
from graphkiln_backend.engines.onnxruntime.quantization import Quantization, quantize
from graphkiln_backend.engines.registry import load_engine
from graphkiln_backend.graph.errors import EngineUnavailable, LoweringError
from graphkiln_backend.graph.golden import GoldenSamples
from graphkiln_backend.passes.graph_file import save
from graphkiln_converters.precision import compare_speed

TEXT = "(float[batch,8] x) => (float[batch,6] y) { a = MatMul(x, first) y = Relu(a) }"
GRAPH = {"first": draw(8, 6)}


@pytest.fixture(autouse=True)
def cpu_with_vnni(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let both engines compute int8 on any CPU: without VNNI, OpenVINO's is refused."""
    for module in ("openvino_graph", "onnxruntime.loading", "onnxruntime.engine"):
        monkeypatch.setattr(f"graphkiln_backend.engines.{module}.saturates_products_of_bytes", lambda: False)


@pytest.fixture
def fp32(tmp_path: Path) -> Path:
    save(graph(TEXT, **GRAPH), tmp_path / "fp32.onnx")
    return tmp_path / "fp32.onnx"


@pytest.fixture
def int8(fp32: Path) -> Path:
    quantize(fp32, {"x": draw(64, 8, seed=6)}, Quantization(), fp32.with_name("int8.onnx"))
    return fp32.with_name("int8.onnx")


@pytest.fixture
def golden() -> GoldenSamples:
    x = draw(2, 8, seed=5)
    outputs = compute(graph(TEXT, **GRAPH), x=x)
    return GoldenSamples(inputs={"x": x}, source_outputs=outputs, graph_outputs=outputs)


def taking(monkeypatch: pytest.MonkeyPatch, *pairs: tuple[float, float]) -> None:
    """What each engine takes for fp32 and for int8, in seconds; both are really run once."""
    left = iter(pairs)

    def times(runs: Mapping[str, Callable[[], object]]) -> dict[str, float]:
        assert all(run() for run in runs.values())
        return dict(zip(runs, next(left), strict=True))

    monkeypatch.setattr("graphkiln_converters.precision.fastest_runs_s", times)


def only(monkeypatch: pytest.MonkeyPatch, engine: str, error: Exception) -> None:
    """Leaves one engine; the others raise."""

    def fail(name: str) -> object:
        if name == engine:
            return load_engine(name)
        raise error

    monkeypatch.setattr("graphkiln_converters.precision.load_engine", fail)


def test_it_is_really_measured(fp32: Path, int8: Path, golden: GoldenSamples) -> None:
    told = compare_speed(fp32, int8, golden)
    assert told.startswith(f"rate of int8 to that of fp32, on {cpu_name()}: ")


def test_where_int8_is_faster_nothing_is_warned_of(
    fp32: Path, int8: Path, golden: GoldenSamples, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    only(monkeypatch, "onnxruntime", EngineUnavailable("openvino is not installed"))
    taking(monkeypatch, (0.3, 0.2))
    assert compare_speed(fp32, int8, golden) == (
        f"rate of int8 to that of fp32, on {cpu_name()}: 1.50x with onnxruntime; "
        "the fastest there is int8 with onnxruntime"
    )
    assert not caplog.records


def test_where_the_fastest_fp32_is_faster_that_is_warned_of(
    fp32: Path, int8: Path, golden: GoldenSamples, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Of OpenVINO's two int8 is the faster one here, and still slower than ONNX Runtime's fp32."""
    taking(monkeypatch, (0.1, 0.3), (0.4, 0.2))
    with caplog.at_level(logging.WARNING):
        told = compare_speed(fp32, int8, golden)
    assert "0.33x with onnxruntime and 2.00x with openvino" in told
    assert told.endswith("the fastest there is fp32 with onnxruntime")
    assert [record.getMessage() for record in caplog.records] == [told]


def test_an_engine_that_refuses_int8_is_left_out(
    fp32: Path, int8: Path, golden: GoldenSamples, monkeypatch: pytest.MonkeyPatch
) -> None:
    """OpenVINO's sums overflow on CPUs without VNNI."""
    only(monkeypatch, "openvino", LoweringError("refused", attempts=()))
    taking(monkeypatch, (0.1, 0.3))
    assert "onnxruntime" not in compare_speed(fp32, int8, golden)


def test_without_any_engine_nothing_is_told(
    fp32: Path, int8: Path, golden: GoldenSamples, monkeypatch: pytest.MonkeyPatch
) -> None:
    only(monkeypatch, "none", LoweringError("refused", attempts=()))
    assert not compare_speed(fp32, int8, golden)
