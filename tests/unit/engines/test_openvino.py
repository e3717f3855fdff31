"""The OpenVINO engine on the committed example, against ONNX Runtime."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from lowered import cpu, lower_version

from graphkiln_backend.cache.store import ArtifactCache
from graphkiln_backend.engines.base import SessionConfig
from graphkiln_backend.engines.onnxruntime import OnnxRuntimeEngine
from graphkiln_backend.engines.openvino import OpenVinoEngine
from graphkiln_backend.graph.device import CPU, Device
from graphkiln_backend.graph.errors import LoweringError, SignatureError
from graphkiln_backend.lowering.plan import plan
from graphkiln_backend.lowering.settings import Settings
from graphkiln_backend.proof.comparison import prove
from graphkiln_backend.proof.policy import OTHER_ENGINE

CONFIG = SessionConfig(engine="openvino", device=CPU, threads=1, spin=False, reason="test")


def test_answers_as_onnx_runtime_does_in_fp32(digits: Path) -> None:
    graph = digits / "1" / "model.onnx"
    feeds = {"INPUT_0": np.random.default_rng(3).normal(size=(5, 1, 32, 32)).astype(np.float32)}
    with OnnxRuntimeEngine().build_reference(graph) as reference, OpenVinoEngine().build(graph, CONFIG) as session:
        prove(reference.run(feeds), session.run(feeds), OTHER_ENGINE, batch_sizes=(5,))
        placement = session.placement(feeds)
    assert placement.precision == "fp32"
    assert placement.nodes["CPU"] >= 5


def test_answers_are_not_overwritten_by_the_next_run(digits: Path) -> None:
    with OpenVinoEngine().build(digits / "1" / "model.onnx", CONFIG) as session:
        first = session.run({"INPUT_0": np.zeros((1, 1, 32, 32), np.float32)})["OUTPUT_0"]
        kept = first.copy()
        session.run({"INPUT_0": np.ones((1, 1, 32, 32), np.float32)})
    np.testing.assert_array_equal(first, kept)


def test_threads_are_not_pinned(digits: Path) -> None:
    """By default each process pins its threads to the machine's first cores: all instances to the same ones."""
    with OpenVinoEngine().build(digits / "1" / "model.onnx", CONFIG) as session:
        assert session._compiled.get_property("ENABLE_CPU_PINNING") is False  # type: ignore[attr-defined]


def test_is_lowered_and_proven_when_it_is_asked_for(digits: Path, cache: ArtifactCache) -> None:
    lowered = lower_version(digits / "1", plan(Settings(engine="openvino"), cpu(1)), cache, batch_sizes=(1, 3))
    with lowered.session:
        assert lowered.config.engine == "openvino"
        assert lowered.self_test is not None
        assert lowered.self_test.verdict.endswith("PASS")


def test_refuses_a_device_that_it_does_not_offer(digits: Path) -> None:
    config = dataclasses.replace(CONFIG, options={"device_type": "GPU"})
    with pytest.raises(LoweringError, match="device_type must be CPU, got 'GPU'"):
        OpenVinoEngine().build(digits / "1" / "model.onnx", config)


@pytest.mark.parametrize("rows", [1, 2, 3, 7])
def test_streams_compute_parts_of_a_batch_side_by_side(digits: Path, rows: int) -> None:
    graph = digits / "1" / "model.onnx"
    feeds = {"INPUT_0": np.random.default_rng(4).normal(size=(rows, 1, 32, 32)).astype(np.float32)}
    streams = dataclasses.replace(CONFIG, streams=3)
    with OpenVinoEngine().build(graph, CONFIG) as one, OpenVinoEngine().build(graph, streams) as three:
        np.testing.assert_allclose(three.run(feeds)["OUTPUT_0"], one.run(feeds)["OUTPUT_0"], rtol=1e-5, atol=1e-7)


def test_what_was_compiled_answers_alike(digits: Path, tmp_path: Path) -> None:
    graph = digits / "1" / "model.onnx"
    feeds = {"INPUT_0": np.random.default_rng(4).normal(size=(2, 1, 32, 32)).astype(np.float32)}
    engine = OpenVinoEngine()
    engine.compile(graph, CONFIG, tmp_path)
    with engine.build(graph, CONFIG) as fresh, engine.build(graph, CONFIG, tmp_path) as compiled:
        assert compiled.signature == fresh.signature
        np.testing.assert_array_equal(compiled.run(feeds)["OUTPUT_0"], fresh.run(feeds)["OUTPUT_0"])


def test_a_damaged_graph_is_a_lowering_error(tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes(b"nonsense")
    with pytest.raises(LoweringError, match="OpenVINO cannot load"):
        OpenVinoEngine().build(tmp_path / "model.onnx", CONFIG)


def test_a_wrong_input_is_a_signature_error(digits: Path) -> None:
    with (
        OpenVinoEngine().build(digits / "1" / "model.onnx", CONFIG) as session,
        pytest.raises(SignatureError, match="wrong size in dimension 1"),
    ):
        session.run({"INPUT_0": np.zeros((1, 2, 32, 32), np.float32)})


def test_does_not_claim_other_devices() -> None:
    assert not OpenVinoEngine().probe(Device.gpu(0)).ok
