"""`graphkiln verify` and `inspect`: what a version is, its proofs, and those of stages and shards."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import onnx_ir
import pytest
import tiny
from commands import RunVerb, words
from graphs import draw, graph

from graphkiln_backend.engines.base import SessionConfig
from graphkiln_backend.engines.onnxruntime import OnnxRuntimeEngine
from graphkiln_backend.lowering import deployment
from graphkiln_backend.lowering.parallel import spreading
from graphkiln_backend.lowering.parallel.building import PipelineSession

TEXT = "(float[batch,4] x) => (float[batch,3] y) { h = MatMul(x, w) r = Tanh(h) y = MatMul(r, v) }"


@pytest.fixture(scope="module")
def version(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.convert(tmp_path_factory.mktemp("tiny"))


class TestInspect:
    def test_a_version(self, run: RunVerb, version: Path) -> None:
        shown = run("inspect", version).out
        for fact in ("x FP32[batch,4]", "1 Gemm", "15 (0.0 MB)", "FP32 100.0%", "opset 18", "- PASS"):
            assert fact in shown
        assert max(map(len, shown.splitlines())) <= 80
        document = json.loads(run("inspect", version, "--json").out)
        assert (document["operators"], document["parameters"], document["flops"]) == ({"Gemm": 1}, 15, 24)
        assert document["signature"]["inputs"][0]["shape"] == ["batch", 4]
        assert document["conversion"]["recipe"]["name"] == "m"
        for path in (version.parent, version / "model.onnx"):
            assert json.loads(run("inspect", path, "--json").out) == document

    def test_a_graph_without_manifest(self, run: RunVerb, tmp_path: Path) -> None:
        source = tiny.write_source(tmp_path)
        (tmp_path / "1").mkdir()
        shutil.copy(source, tmp_path / "1" / "model.onnx")
        assert "has no manifest" in words(run("inspect", tmp_path / "1").out)
        for path, graph_path in ((tmp_path / "1", tmp_path / "1" / "model.onnx"), (source, source)):
            document = json.loads(run("inspect", path, "--json").out)
            assert document["graph"] == str(graph_path)
            assert document["signature"]["outputs"][0]["name"] == "y"
            assert not document.keys() & {"conversion", "provenance"}


def test_the_settings_of_the_server_apply(
    run: RunVerb, version: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A graph that is served with few rewrites is verified with these."""
    shutil.copytree(version.parent, tmp_path / "m")
    config = tmp_path / "m" / "config.pbtxt"
    config.write_text(f"{config.read_text()}\noptimization {{ graph {{ level: -1 }} }}\n")
    levels = list[str]()
    build = OnnxRuntimeEngine.build

    def recorded(self: OnnxRuntimeEngine, path: Path, config: SessionConfig, compiled: Path | None = None) -> Any:
        levels.append(config.tuning.graph_level)
        return build(self, path, config, compiled)

    monkeypatch.setattr(OnnxRuntimeEngine, "build", recorded)
    run("verify", version)
    run("verify", tmp_path / "m" / "1")
    run("explain", tmp_path / "m")
    assert levels == ["all", "basic", "basic"]


def test_verdicts_and_placement(run: RunVerb, version: Path) -> None:
    lines = run("verify", version).out.splitlines()
    assert [line.split(":")[0] for line in lines] == [
        "fp32 on onnxruntime, source model",
        "fp32 on onnxruntime, saved graph",
        "ran",
    ]
    assert lines[-1].endswith("mostly in fp32")
    document = json.loads(run("verify", version, "--json").out)
    assert (len(document["verdicts"]), document["parallel"]) == (2, None)
    assert document["placement"]["precision"] == "fp32"


# Versions with `parallel` in their configuration: `verify` proves what is served.


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("converted")
    onnx_ir.save(graph(TEXT, w=draw(4, 5), v=draw(5, 3)), folder / "m.onnx")
    finished = tiny.run("convert", folder / "m.onnx", "--name", "m", "--model-store", folder / "store")
    assert finished.exit_code == 0, finished.output
    return folder / "store" / "m" / "1"


def add_parallel(converted: Path, folder: Path, numbers: str, more: str = "") -> Path:
    """Copy the version, with a configuration that says `parallel`."""
    model = shutil.copytree(converted.parent, folder / "store" / "m")
    line = f'parameters {{ key: "parallel" value {{ string_value: "{numbers}" }} }}'
    with (model / "config.pbtxt").open("a") as file:
        file.write(f"\n{line}\n{more}\n")
    return model / "1"


class TestParallel:
    @pytest.fixture(autouse=True)
    def _two_cores(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Count an existing core twice."""
        core = min(os.sched_getaffinity(0))
        monkeypatch.setattr(deployment, "usable_cores", lambda: 2)
        monkeypatch.setattr(spreading, "usable_core_numbers", lambda: (core,) * 2)

    def test_stages_are_proven(self, run: RunVerb, converted: Path, tmp_path: Path) -> None:
        version = add_parallel(converted, tmp_path, "pipeline=2, micro_batches=2")
        finished = run("verify", version, "--cache", tmp_path / "cache")
        assert finished.code == 0, finished.err
        split = "fp32 on onnxruntime with pipeline=2, tensor=1, micro_batches=2"
        lines = finished.out.splitlines()
        assert [line.split(":")[0] for line in lines if line.endswith("PASS")] == [
            "fp32 on onnxruntime, source model",
            "fp32 on onnxruntime, saved graph",
            f"{split}, source model",
            f"{split}, saved graph",
        ]
        assert "parallel: pipeline=2, tensor=1, micro_batches=2" in lines
        assert sum(line.startswith("stage ") for line in lines) == 2
        assert sum(line.startswith("ran: ") for line in lines) == 2
        options = ("--json", "--precision", "fp16", "--cache", tmp_path / "cache")
        document = json.loads(run("verify", version, *options).out)["parallel"]
        assert document["plan"][0].startswith("parallel: pipeline=2, tensor=1")
        assert len(document["verdicts"]) == 2
        assert all(each["verdict"].startswith("fp16 on onnxruntime with pipeline=2") for each in document["verdicts"])
        assert document["placement"]["precision"] == "fp32"

    def test_copies_are_proven_by_the_whole_graph(self, run: RunVerb, converted: Path, tmp_path: Path) -> None:
        version = add_parallel(converted, tmp_path, "data=2", "instance_group [ { count: 2 kind: KIND_CPU } ]")
        lines = run("verify", version, "--cache", tmp_path / "cache").out.splitlines()
        assert lines[-1] == "each instance computes the whole graph, which is proven above"
        assert sum(line.endswith("PASS") for line in lines) == 2

    @pytest.mark.parametrize("self_test", ["on", "off"])
    def test_wrong_stages_of_a_right_graph_are_refused(
        self, run: RunVerb, converted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, self_test: str
    ) -> None:
        cut = PipelineSession._cut
        monkeypatch.setattr(PipelineSession, "_cut", lambda self, feeds: list(reversed(cut(self, feeds))))
        setting = f'parameters {{ key: "self_test" value {{ string_value: "{self_test}" }} }}'
        version = add_parallel(converted, tmp_path, "pipeline=2, micro_batches=2", setting)
        finished = run("verify", version, "--cache", tmp_path / "cache")
        assert finished.code == 1
        assert "the outputs changed" in finished.err
        assert sum(line.endswith("PASS") for line in finished.out.splitlines()) == 2

    @pytest.mark.parametrize(
        ("numbers", "message"),
        [("pipeline=3", "needs 3 groups of cores"), ("tensor=2", "no product"), ("pipelin=2", "pipelin")],
    )
    def test_what_cannot_be_served_cannot_be_verified(
        self, run: RunVerb, converted: Path, tmp_path: Path, numbers: str, message: str
    ) -> None:
        finished = run("verify", add_parallel(converted, tmp_path, numbers), "--cache", tmp_path / "cache")
        assert finished.code
        assert message in finished.err

    def test_verify_lower_and_serve_share_the_parts(self, run: RunVerb, converted: Path, tmp_path: Path) -> None:
        """A graph is split once: parts are found by content, not by the name of the model."""
        version = add_parallel(converted, tmp_path, "pipeline=2")
        cache = ("--cache", tmp_path / "cache")
        assert run("verify", version, *cache).err.count("splitting the graph") == 1
        assert "splitting the graph" not in run("lower", version, *cache).err
        renamed = shutil.copytree(version.parent, tmp_path / "store" / "other")
        config = (renamed / "config.pbtxt").read_text().replace('name: "m"', 'name: "other"')
        (renamed / "config.pbtxt").write_text(config)
        finished = run("lower", renamed, *cache)
        assert (finished.code, "splitting the graph" in finished.err) == (0, False)
        assert run("cache", "list", *cache).out.count("parts-") == 1

    def test_a_conversion_names_what_is_left_to_prove(self, run: RunVerb, converted: Path, tmp_path: Path) -> None:
        version = add_parallel(converted, tmp_path, "pipeline=2")
        source = tiny.write_source(tmp_path)
        finished = run("convert", source, "--name", "m", "--model-store", version.parent.parent)
        assert finished.code == 0, finished.err
        assert f"parallel: pipeline=2 (config.pbtxt): graphkiln verify {version.parent / '2'}" in finished.out
