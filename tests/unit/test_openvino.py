"""The OpenVINO engine on the committed example, against ONNX Runtime."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from graphkiln.engines.base import Step
from graphkiln.engines.onnxruntime import OnnxRuntimeEngine
from graphkiln.engines.openvino import OpenVinoEngine
from graphkiln.graph.errors import LoweringError, SignatureError
from graphkiln.lowering.lower import lower
from graphkiln.lowering.plan import plan
from graphkiln.lowering.settings import Settings
from graphkiln.proof.comparison import prove
from graphkiln.proof.policy import OTHER_ENGINE
from graphkiln.repository.version import read_version

STEP = Step(engine="openvino", device="cpu", threads=1, spin=False, reason="test")


def test_answers_as_onnx_runtime_does_in_fp32(digits: Path) -> None:
    graph = digits / "1" / "model.onnx"
    feeds = {"INPUT_0": np.random.default_rng(3).normal(size=(5, 1, 32, 32)).astype(np.float32)}
    with OnnxRuntimeEngine().build_reference(graph) as reference, OpenVinoEngine().build(graph, STEP) as session:
        prove(reference.run(feeds), session.run(feeds), OTHER_ENGINE, batch_sizes=(5,))
        placement = session.placement(feeds)
    assert placement.precision == "fp32"
    assert placement.nodes["CPU"] >= 5


def test_answers_are_not_overwritten_by_the_next_run(digits: Path) -> None:
    with OpenVinoEngine().build(digits / "1" / "model.onnx", STEP) as session:
        first = session.run({"INPUT_0": np.zeros((1, 1, 32, 32), np.float32)})["OUTPUT_0"]
        kept = first.copy()
        session.run({"INPUT_0": np.ones((1, 1, 32, 32), np.float32)})
    np.testing.assert_array_equal(first, kept)


def test_is_lowered_and_proven_when_it_is_asked_for(digits: Path) -> None:
    steps = plan(Settings(engine="openvino", engine_from="--enable-openvino"), device="cpu", cores=1, instances=1)
    lowered = lower(read_version(digits / "1"), steps, warm_sizes=(1, 3))
    with lowered.session:
        assert lowered.step.engine == "openvino"
        assert lowered.self_test is not None
        assert lowered.self_test.verdict.endswith("PASS")


@pytest.mark.parametrize("options", [{"precision": "INT4"}, {"device_type": "GPU"}, {"num_of_threads": "two"}])
def test_refuses_options_that_it_does_not_offer(digits: Path, options: dict[str, str]) -> None:
    step = dataclasses.replace(STEP, accelerator=options)
    with pytest.raises(LoweringError, match=next(iter(options.values()))):
        OpenVinoEngine().build(digits / "1" / "model.onnx", step)


def test_a_damaged_graph_is_a_lowering_error(tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes(b"nonsense")
    with pytest.raises(LoweringError, match="OpenVINO cannot load"):
        OpenVinoEngine().build(tmp_path / "model.onnx", STEP)


def test_a_wrong_input_is_a_signature_error(digits: Path) -> None:
    with (
        OpenVinoEngine().build(digits / "1" / "model.onnx", STEP) as session,
        pytest.raises(SignatureError, match="wrong size in dimension 1"),
    ):
        session.run({"INPUT_0": np.zeros((1, 2, 32, 32), np.float32)})


def test_does_not_claim_other_devices() -> None:
    assert not OpenVinoEngine().probe("gpu:0").ok
