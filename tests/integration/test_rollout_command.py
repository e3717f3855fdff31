"""`graphkiln rollout` with a real server: gates abort a candidate with rare errors, and promote an equal one."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import zoo
from onnx import helper
from running import Server, Serving, run_here

from graphkiln_client import Client

pytestmark = pytest.mark.server

WRONG = 0.01
MOST_REQUESTS = 20_000


def sums(limit: float) -> onnx.ModelProto:
    """`y = x[:, :2]`, wrong where the third input, 0..1, is above a limit."""
    constants: dict[str, Any] = {
        "weights": np.float32([[1, 0], [0, 1], [0, 0]]),
        "last": np.float32([[0, 0], [0, 0], [1, 0]]),
        "limit": np.float32(limit),
        "large": np.float32(1e4),
    }
    nodes = [
        helper.make_node("MatMul", ["x", "weights"], ["sum"]),
        helper.make_node("MatMul", ["x", "last"], ["u"]),
        helper.make_node("Sub", ["u", "limit"], ["above"]),
        helper.make_node("Relu", ["above"], ["positive"]),
        helper.make_node("Mul", ["positive", "large"], ["fault"]),
        helper.make_node("Add", ["sum", "fault"], ["y"]),
    ]
    return zoo.model(nodes, [zoo.value("x", ("batch", 3))], [zoo.value("y", ("batch", 2))], constants)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    zoo.add(tmp_path / "store", "sums", sums(2.0), 'backend: "graphkiln"\nmax_batch_size: 8')
    return tmp_path / "store" / "sums"


@pytest.fixture
def server(model: Path, tmp_path: Path) -> Iterator[Server]:
    with Serving(tmp_path, "--model-store", model.parent, "--state", tmp_path / "state") as server:
        server.wait_ready()
        yield server


def add_version(model: Path, version: int, graph: onnx.ModelProto) -> None:
    shutil.copytree(model / "1", model / str(version))
    onnx.save(graph, model / str(version) / "model.onnx")


def rollout(verb: str, model: Path, tmp_path: Path, *words: str) -> dict[str, Any]:
    """Run a verb; return its JSON."""
    done = run_here("rollout", verb, model, *words, "--state", tmp_path / "state", "--json")
    assert done.returncode == 0, done.stderr
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def ask_until_it_ends(server: Server, model: Path, tmp_path: Path) -> dict[str, Any]:
    """Send requests until the server has ended the rollout; every answer must be right."""
    random = np.random.default_rng(3)
    with Client(server.url) as client:
        for number in range(MOST_REQUESTS):
            x = random.random((1, 3), np.float32)
            (y,) = client.model("sums").infer({"x": x}).values()
            np.testing.assert_allclose(y, x[:, :2], rtol=1e-6)
            if number % 200 == 0:
                status = rollout("status", model, tmp_path)
                if status["phase"] in {"aborted", "promoted"}:
                    return status
    pytest.fail(f"no decision: {status}")


def test_planted_candidate_is_aborted(server: Server, model: Path, tmp_path: Path) -> None:
    add_version(model, 2, sums(1 - WRONG))
    begun = rollout(
        "start", model, tmp_path, "--version", "2", "--shadow", "100%", "--agree", "99.5%", "--requests", "5000",
        "--then", "100%",
    )  # fmt: skip
    assert (begun["phase"], begun["serving"], begun["applied"]) == ("shadow", 1, True)
    ended = ask_until_it_ends(server, model, tmp_path)
    assert ended["phase"] == "aborted"
    assert "decisions differ" in ended["reason"]
    assert ended["progress"]["compared"] < 5000
    server.wait_until(lambda: 'graphkiln_rollout_info{model="sums",version="2",phase="aborted",by="server",serving="1"}'
                      in server.metrics())  # fmt: skip
    assert run_here("rollout", "promote", model, "--state", tmp_path / "state").returncode == 2


def test_equal_candidate_is_promoted(server: Server, model: Path, tmp_path: Path) -> None:
    add_version(model, 2, sums(2.0))
    rollout(
        "start", model, tmp_path, "--version", "2", "--shadow", "100%", "--agree", "98%", "--requests", "500",
        "--then", "50%,100%",
    )  # fmt: skip
    ended = ask_until_it_ends(server, model, tmp_path)
    assert (ended["phase"], ended["candidate"]) == ("promoted", 2)
    listed = run_here("models", "--url", server.url)
    assert "sums" in listed.stdout
    assert "candidate" not in listed.stdout
    with Client(server.url) as client:
        states = {(each.name, each.version): each.state for each in client.models()}
    assert states["sums", "2"] == "READY"


@pytest.mark.usefixtures("server")
def test_by_hand(model: Path, tmp_path: Path) -> None:
    add_version(model, 2, sums(2.0))
    assert rollout("start", model, tmp_path, "--version", "2")["share"] == 0.05
    assert rollout("traffic", model, tmp_path, "25%")["phase"] == "traffic"
    assert rollout("abort", model, tmp_path)["phase"] == "aborted"
    again = rollout("start", model, tmp_path, "--version", "2", "--shadow", "1%")
    assert (again["phase"], again["wanted"]["serial"]) == ("shadow", 4)
    assert rollout("promote", model, tmp_path)["phase"] == "promoted"
