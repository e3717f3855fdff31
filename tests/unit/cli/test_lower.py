"""`graphkiln lower`: the artifact cache filled ahead of time."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import zoo
from typer.testing import CliRunner, Result

from graphkiln.cli.lower import measure_model
from graphkiln.cli.main import app
from graphkiln_backend.cache.store import ArtifactCache
from graphkiln_backend.graph.errors import ExecutionError, LoweringError
from graphkiln_backend.graph.graph_costs import NODE_TIMES_FILE, NodeTimes


@pytest.fixture
def model(digits: Path, tmp_path: Path) -> Path:
    return shutil.copytree(digits, tmp_path / "store" / "digits")


def lower(model: Path, cache: str | Path, *settings: str) -> Result:
    flags = [argument for setting in settings for argument in ("--set", setting)]
    return CliRunner().invoke(app, ["lower", str(model), f"--cache={cache}", *flags])


def entries(cache: Path) -> list[str]:
    with ArtifactCache(cache) as opened:
        return sorted(str(item.path) for item in opened.entries())


def test_what_was_built_what_was_proven_and_how_long_it_took(model: Path, tmp_path: Path) -> None:
    result = lower(model, tmp_path / "cache")
    assert result.exit_code == 0, result.exception
    placement, verdict, seconds = result.stdout.splitlines()
    assert re.fullmatch(r"onnxruntime on cpu: \d+ nodes on CPUExecutionProvider; products: 5 in fp32", placement)
    assert verdict.endswith("PASS")
    assert re.fullmatch(r"ready in \d+\.\d s", seconds)


def test_the_second_time_builds_nothing(model: Path, tmp_path: Path, logged: list[str]) -> None:
    lower(model, tmp_path / "cache")
    built = entries(tmp_path / "cache")
    assert built
    assert any("compiling for onnxruntime on cpu" in line for line in logged)
    logged.clear()
    assert lower(model, tmp_path / "cache").exit_code == 0
    assert entries(tmp_path / "cache") == built
    assert not any("compiling" in line for line in logged)


def test_fallbacks_and_notes_go_to_stderr(model: Path) -> None:
    result = lower(model, "off", "engine=tensorrt", "fallback=onnxruntime", "self_test=off")
    assert "graphkiln: tensorrt on cpu: tensorrt serves gpu:N, not cpu" in result.stderr
    assert "graphkiln: self_test: off: the golden samples were not replayed" in result.stderr
    assert "tensorrt" not in result.stdout
    assert "PASS" not in result.stdout


def test_what_cannot_be_built_keeps_nothing(model: Path, tmp_path: Path) -> None:
    result = lower(model, tmp_path / "cache", "engine=tensorrt")
    assert isinstance(result.exception, LoweringError)
    assert result.stdout == ""
    kept = [Path(entry).name for entry in entries(tmp_path / "cache")]
    assert [name for name in kept if not name.startswith("facts-")] == []  # what the file says is no artifact


def test_a_graph_that_computes_without_end_is_given_up(tmp_path: Path) -> None:
    model = zoo.add(tmp_path / "store", "endless", zoo.endless()).parent
    result = CliRunner().invoke(app, ["lower", str(model), "--cache=off", "--compute-limit=0.3"])
    assert isinstance(result.exception, ExecutionError)
    assert "--compute-limit" in str(result.exception)


# `graphkiln lower --measure`: times of nodes beside the graph, and the plan that follows them.

SPLIT = "--set=parallel=pipeline=2"


def call(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, [*map(str, arguments), "--cache=off", SPLIT])


def test_measured_times_are_what_is_planned_by(model: Path) -> None:
    assert "costs: measured" not in call("explain", model, "--plan-only").stdout
    found = call("lower", model, "--measure")
    assert found.exit_code == 0, found.exception
    path = model / "1" / NODE_TIMES_FILE
    assert f"nodes for batches of 1 and 32: {path}" in found.stderr.replace("\n", "")
    planned = " ".join(call("explain", model, "--plan-only").stdout.split())
    assert "costs: measured by onnxruntime" in planned
    assert "by measured costs" in planned
    assert len(NodeTimes.read(path).at(1)) > 5


def test_times_that_cannot_be_used_are_measured_again(model: Path) -> None:
    path = model / "1" / NODE_TIMES_FILE
    path.write_text(json.dumps({"graph": "another", "runtime": "", "machine": "", "batches": {"1": {"a": 1}}}))
    refused = call("explain", model, "--plan-only")
    assert isinstance(refused.exception, LoweringError)
    assert "it was measured of another graph" in str(refused.exception)
    with ArtifactCache(model / "cache", lasting=False) as cache:
        measure_model(str(model), model, cache)
    assert call("explain", model, "--plan-only").exit_code == 0


def test_what_was_fetched_has_no_place_for_them(model: Path, tmp_path: Path) -> None:
    with (
        ArtifactCache(tmp_path / "cache", lasting=False) as cache,
        pytest.raises(LoweringError, match="s3://bucket/digits"),
    ):
        measure_model("s3://bucket/digits", model, cache)
    assert not (model / "1" / NODE_TIMES_FILE).exists()


def test_the_same_as_json(model: Path, tmp_path: Path) -> None:
    arguments = ["lower", str(model), f"--cache={tmp_path / 'cache'}", "--json"]
    document = json.loads(CliRunner().invoke(app, arguments).stdout)
    assert (document["engine"], document["placement"]["precision"]) == ("onnxruntime", "fp32")
    assert document["seconds"] > 0
