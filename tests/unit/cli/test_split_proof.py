"""Versions that their configuration spreads over devices: `verify` proves what would be served."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import onnx_ir
import pytest
from graphs import draw, graph
from tiny import run, write_source

from graphkiln.cli.verify import prove_split, requested_split
from graphkiln_backend.graph.errors import LoweringError, VerificationError
from graphkiln_backend.graph.precision import Precision
from graphkiln_backend.lowering import deployment
from graphkiln_backend.lowering.parallel import spreading
from graphkiln_backend.lowering.parallel.building import PipelineSession

TEXT = "(float[batch,4] x) => (float[batch,3] y) { h = MatMul(x, w) r = Tanh(h) y = MatMul(r, v) }"


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("converted")
    onnx_ir.save(graph(TEXT, w=draw(4, 5), v=draw(5, 3)), folder / "m.onnx")
    finished = run("convert", folder / "m.onnx", "--name", "m", "--model-store", folder / "store")
    assert finished.exit_code == 0, finished.output
    return folder / "store" / "m" / "1"


@pytest.fixture(autouse=True)
def _two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """A core that is there, twice."""
    core = min(os.sched_getaffinity(0))
    monkeypatch.setattr(deployment, "usable_cores", lambda: 2)
    monkeypatch.setattr(spreading, "usable_core_numbers", lambda: (core,) * 2)


def spread(converted: Path, folder: Path, numbers: str, more: str = "") -> Path:
    """A copy of the version whose model's configuration says `parallel`."""
    model = shutil.copytree(converted.parent, folder / "store" / "m")
    line = f'parameters {{ key: "parallel" value {{ string_value: "{numbers}" }} }}'
    with (model / "config.pbtxt").open("a") as file:
        file.write(f"\n{line}\n{more}\n")
    return model / "1"


def test_the_whole_graph_and_then_what_would_be_served(converted: Path, tmp_path: Path) -> None:
    version = spread(converted, tmp_path, "pipeline=2, micro_batches=2")
    finished = run("verify", version, "--cache", tmp_path / "cache")
    assert finished.exit_code == 0, finished.output
    split = "fp32 on onnxruntime with pipeline=2, tensor=1, micro_batches=2"
    lines = finished.output.splitlines()
    verdicts = [line.split(":")[0] for line in lines if line.endswith("PASS")]
    assert verdicts == [
        "fp32 on onnxruntime, source model",
        "fp32 on onnxruntime, saved graph",
        f"{split}, source model",
        f"{split}, saved graph",
    ]
    assert "parallel: pipeline=2, tensor=1, micro_batches=2" in lines
    assert sum(line.startswith("stage ") for line in lines) == 2
    assert sum(line.startswith("ran: ") for line in lines) == 2


def test_json(converted: Path, tmp_path: Path) -> None:
    version = spread(converted, tmp_path, "pipeline=2")
    document = json.loads(run("verify", version, "--json", "--cache", tmp_path / "cache").stdout)
    assert document["parallel"]["plan"][0].startswith("parallel: pipeline=2, tensor=1")
    assert len(document["parallel"]["verdicts"]) == len(document["verdicts"]) == 2
    assert document["parallel"]["placement"]["precision"] == "fp32"
    assert json.loads(run("verify", converted, "--json").stdout)["parallel"] is None


def test_copies_are_proven_as_the_whole_graph_is(converted: Path, tmp_path: Path) -> None:
    version = spread(converted, tmp_path, "data=2", "instance_group [ { count: 2 kind: KIND_CPU } ]")
    lines = run("verify", version, "--cache", tmp_path / "cache").output.splitlines()
    assert lines[-1] == "each instance computes the whole graph, which is proven above"
    assert sum(line.endswith("PASS") for line in lines) == 2


def test_a_split_that_computes_something_else_is_refused(
    converted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Although the whole graph is right."""
    cut = PipelineSession._cut
    monkeypatch.setattr(PipelineSession, "_cut", lambda self, feeds: list(reversed(cut(self, feeds))))
    version = spread(converted, tmp_path, "pipeline=2, micro_batches=2")
    finished = run("verify", version, "--cache", tmp_path / "cache")
    assert isinstance(finished.exception, LoweringError)
    assert "the outputs changed" in str(finished.exception)
    assert sum(line.endswith("PASS") for line in finished.output.splitlines()) == 2


def test_also_where_its_self_test_is_off(converted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cut = PipelineSession._cut
    monkeypatch.setattr(PipelineSession, "_cut", lambda self, feeds: list(reversed(cut(self, feeds))))
    off = 'parameters { key: "self_test" value { string_value: "off" } }'
    version = spread(converted, tmp_path, "pipeline=2, micro_batches=2", off)
    with pytest.raises(VerificationError, match="the outputs changed"):
        prove_split(version, str(tmp_path / "cache"), precision=None, samples=None)


@pytest.mark.parametrize(
    ("numbers", "words"),
    [("pipeline=3", "needs 3 groups of cores"), ("tensor=2", "no product"), ("pipelin=2", "unknown|pipelin")],
)
def test_what_cannot_be_served_cannot_be_verified(converted: Path, tmp_path: Path, numbers: str, words: str) -> None:
    finished = run("verify", spread(converted, tmp_path, numbers), "--cache", tmp_path / "cache")
    assert finished.exit_code != 0
    assert isinstance(finished.exception, Exception)
    assert any(word in str(finished.exception) for word in words.split("|"))


def test_the_row_of_the_policy_is_that_of_the_command(converted: Path, tmp_path: Path) -> None:
    version = spread(converted, tmp_path, "pipeline=2")
    found = prove_split(version, str(tmp_path / "cache"), precision=Precision.FP16, samples=None)
    assert all(verdict.verdict.startswith("fp16 on onnxruntime with pipeline=2") for verdict in found.verdicts)


@pytest.mark.parametrize(("text", "value"), [("pipeline=2", "pipeline=2"), ("", "")])
def test_what_the_configuration_says(converted: Path, tmp_path: Path, text: str, value: str) -> None:
    version: Any = spread(converted, tmp_path, text) if text else converted
    assert requested_split(version) == value


def test_parts_are_those_that_the_server_will_find(converted: Path, tmp_path: Path, logged: list[str]) -> None:
    """`verify`, `lower` and a start share the artifacts of stages: they are cut once."""
    version = spread(converted, tmp_path, "pipeline=2")
    cache = ("--cache", tmp_path / "cache")
    assert run("verify", version, *cache).exit_code == 0
    assert sum("splitting the graph" in line for line in logged) == 1
    assert run("lower", version, *cache).exit_code == 0
    renamed = shutil.copytree(version.parent, tmp_path / "store" / "other")
    config = (renamed / "config.pbtxt").read_text().replace('name: "m"', 'name: "other"')
    (renamed / "config.pbtxt").write_text(config)
    assert run("lower", renamed, *cache).exit_code == 0
    assert sum("splitting the graph" in line for line in logged) == 1, "the content names them, not the model"
    listed = run("cache", "list", *cache).output
    assert listed.count("parts-") == 1


def test_a_conversion_says_what_is_left_to_prove(converted: Path, tmp_path: Path) -> None:
    version = spread(converted, tmp_path, "pipeline=2")
    finished = run("convert", write_source(tmp_path), "--name", "m", "--model-store", version.parent.parent)
    assert finished.exit_code == 0, finished.output
    assert f"parallel: pipeline=2 (config.pbtxt): graphkiln verify {version.parent / '2'}" in finished.output
