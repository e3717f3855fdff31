"""`graphkiln lower --measure`: times of nodes beside the graph, and the plan that follows them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from graphkiln.cli.lower import measure_model
from graphkiln.cli.main import app
from graphkiln_backend.cache.store import ArtifactCache
from graphkiln_backend.graph.errors import LoweringError
from graphkiln_backend.graph.graph_costs import NODE_TIMES_FILE, NodeTimes

SPLIT = "--set=parallel=pipeline=2"


@pytest.fixture
def model(digits: Path, tmp_path: Path) -> Path:
    return shutil.copytree(digits, tmp_path / "store" / "digits")


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
        pytest.raises(LoweringError, match="s3://bucket/digits has no graph of its own on this machine"),
    ):
        measure_model("s3://bucket/digits", model, cache)
    assert not (model / "1" / NODE_TIMES_FILE).exists()
