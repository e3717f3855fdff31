"""`graphkiln adopt`, and the other verbs on versions of other backends."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import tiny
from commands import BreakOutputs, RunVerb, words
from ir_files import product, save_ir

TENSORS = (
    'input { name: "x" data_type: TYPE_FP32 dims: [ 4 ] } output { name: "y" data_type: TYPE_FP32 dims: [ 3 ] } '
    "max_batch_size: 8"
)


@pytest.fixture
def reference(tmp_path: Path) -> Path:
    return tiny.write_source(tmp_path)


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    """A model with an opaque graph."""
    version = tmp_path / "store" / "plan" / "1"
    version.mkdir(parents=True)
    (version / "model.plan").write_bytes(b"opaque")
    (version.parent / "config.pbtxt").write_text(f'platform: "tensorrt_plan" {TENSORS}')
    return version.parent


def test_opaque_graph(run: RunVerb, plan: Path, reference: Path) -> None:
    finished = run("adopt", plan, "--reference", reference, "--precision", "fp16")
    assert finished.code == 0, finished.err
    shown = words(finished.out)
    for fact in ("model.plan", "x FP32[batch,4]", "4 samples, meant to be in fp16", "none yet: the graph is not run"):
        assert fact in shown
    assert "adopted as fp16: the expected outputs are those of" in words(run("inspect", plan).out)
    document = json.loads(run("inspect", plan, "--json").out)
    assert document["adoption"]["precision"] == "fp16"
    assert document["unproven"] is False
    assert "operators" not in document
    verified = run("verify", plan)
    assert (verified.code, "graphkiln serve proves it" in verified.err) == (1, True)


def test_onnx_graph(run: RunVerb, plan: Path, reference: Path) -> None:
    model = plan.with_name("net")
    (model / "1").mkdir(parents=True)
    shutil.copy(reference, model / "1" / "model.onnx")
    finished = run("adopt", model / "1", "--reference", reference, "--json")
    assert finished.code == 0, finished.err
    assert json.loads(finished.out)["adoption"] == {
        "reference": str(reference), "precision": "fp32", "recorded": False
    }  # fmt: skip
    lines = run("verify", model).out.splitlines()
    assert lines[0].startswith(f"fp32 on onnxruntime, {reference}: error 0")
    assert len(lines) == 2  # one reference, and what ran
    document = json.loads(run("inspect", model, "--json").out)
    assert document["operators"] == {"MatMul": 1, "Add": 1}
    assert document["verification"][0]["step"] == "adopted fp32"


class TestAsServed:
    """The samples are replayed on the session that a server would build with the model's configuration."""

    @pytest.fixture
    def model(self, plan: Path, reference: Path) -> Path:
        model = plan.with_name("net")
        (model / "1").mkdir(parents=True)
        shutil.copy(reference, model / "1" / "model.onnx")
        (model / "config.pbtxt").write_text('platform: "onnxruntime_onnx" max_batch_size: 8')
        return model

    def test_the_largest_batch_is_replayed(
        self, run: RunVerb, model: Path, reference: Path, break_outputs: BreakOutputs
    ) -> None:
        break_outputs(lambda rows, _: rows == 8)
        finished = run("adopt", model, "--reference", reference)
        assert (finished.code, "proven, but not as it would be served" in words(finished.err)) == (1, True)
        assert [path.name for path in (model / "1").iterdir()] == ["model.onnx"]

    def test_rewrites_that_break_it_are_off_in_each_command(
        self, run: RunVerb, model: Path, reference: Path, break_outputs: BreakOutputs
    ) -> None:
        break_outputs(lambda _, rewrites: rewrites)
        for verb in (["adopt", model, "--reference", reference], ["verify", model], ["explain", model]):
            finished = run(*verb)
            assert finished.code == 0, finished.err
            assert "so they are off (optimization.graph.level: 2)" in words(finished.out + finished.err)

    def test_settings_of_the_model_are_used(
        self, run: RunVerb, model: Path, reference: Path, break_outputs: BreakOutputs
    ) -> None:
        break_outputs(lambda _, rewrites: rewrites)
        with (model / "config.pbtxt").open("a") as config:
            config.write(" optimization { graph { level: 2 } }")
        finished = run("adopt", model, "--reference", reference)
        assert (finished.code, "so they are off" in finished.err) == (0, False)

    def test_an_engine_that_is_not_here_is_left_to_its_server(self, run: RunVerb, model: Path, reference: Path) -> None:
        with (model / "config.pbtxt").open("a") as config:
            config.write(' parameters { key: "engine" value { string_value: "tensorrt" } }')
        finished = run("adopt", model, "--reference", reference)
        assert finished.code == 0, finished.err
        assert "not replayed as they would be served, the server proves them" in words(finished.err)


def test_graph_in_openvino_ir(run: RunVerb, plan: Path, reference: Path) -> None:
    version = save_ir(reference, plan.with_name("ir") / "1" / "model.xml").parent
    assert "unproven: this graph has no manifest" in words(run("inspect", version).out)
    finished = run("adopt", version)
    assert finished.code == 0, finished.err
    assert "recorded, not proven: no reference says" in words(finished.out)
    shown = words(run("inspect", version).out)
    assert "outputs were recorded from model.xml itself, on this machine" in shown
    assert "x FP32[" in shown
    assert run("verify", version).out.startswith("fp32 on openvino, model.xml itself, on this machine: error 0")


def test_unproven_graphs(run: RunVerb, plan: Path) -> None:
    shown = words(run("inspect", plan).out)
    assert "x FP32[batch,4]" in shown
    assert "unproven: this graph has no manifest" in shown
    assert "it is unproven: graphkiln adopt adds" in run("verify", plan).err
    (plan / "config.pbtxt").write_text('platform: "tensorrt_plan"')
    assert "not known: config.pbtxt leaves them to the backend" in words(run("inspect", plan).out)
    document = json.loads(run("inspect", plan, "--json").out)
    assert (document["signature"], document["unproven"]) == (None, True)


def test_adopted_versions_are_signed(run: RunVerb, plan: Path, reference: Path, tmp_path: Path) -> None:
    assert run("adopt", plan, "--reference", reference).code == 0
    assert run("keygen", tmp_path / "key").code == 0
    assert "4 files signed" in run("sign", plan, "--key", tmp_path / "key").out
    assert "by " in words(run("inspect", plan, "--trusted-keys", tmp_path / "key.pub").out).partition("signed")[2]


def test_openvino_ir(run: RunVerb, tmp_path: Path) -> None:
    path = save_ir(product(), tmp_path / "store" / "m" / "1" / "any.xml")
    for place in (path, path.parent, path.parent.parent):
        shown = words(run("inspect", place).out)
        for fact in ("x FP32[-1,3]", "y FP32[-1,4]", "1 MatMul", "12 (0.0 MB)", "FP32 100.0%", "OpenVINO IR 11"):
            assert fact in shown
        assert "unproven" in shown
    assert "recorded, not proven" in words(run("adopt", path.parent.parent).out)
    assert "unproven" not in words(run("inspect", path).out)
    explained = run("explain", path.parent.parent, "--cache", "off")
    assert "self-test: fp32 on openvino: error 0" in explained.out
    assert "rejected: onnxruntime: it does not read OpenVINO IR" in explained.out
    assert run("lower", path.parent.parent, "--cache", tmp_path / "cache").code == 0
    document = json.loads(run("inspect", path, "--json").out)
    assert (document["opset"], document["ir_version"]) == (None, 11)


def test_mistakes(run: RunVerb, plan: Path, reference: Path) -> None:
    finished = run("adopt", plan)
    assert (finished.code, "--reference model.onnx" in finished.err) == (2, True)
    finished = run("adopt", "s3://bucket/plan", "--reference", reference)
    assert (finished.code, "is not on this machine" in finished.err) == (2, True)
    finished = run("adopt", plan, "--reference", "torchvison:resnet18")
    assert (finished.code, "did you mean 'torchvision:resnet18'" in finished.err) == (2, True)
    finished = run("adopt", plan, "--reference", reference, "--preprocess", "{")
    assert (finished.code, "cannot read --preprocess" in finished.err) == (2, True)
