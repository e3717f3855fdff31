"""Outputs that nobody asks for are not computed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest
import zoo
from lowered import lower_version
from onnx import helper

from graphkiln_backend.cache.store import ArtifactCache
from graphkiln_backend.engines.base import SessionConfig
from graphkiln_backend.graph.device import CPU
from graphkiln_backend.graph.errors import LoweringError, SignatureError
from graphkiln_backend.lowering.proven_session import ProvenSession
from graphkiln_backend.passes.outputs import keep_outputs

GOOD = np.array([[0, 1]], np.int64)
BAD = np.array([[7, 7]], np.int64)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return zoo.add(tmp_path, "m", zoo.good_and_fragile())


@pytest.fixture
def lowered(folder: Path, cache: ArtifactCache) -> Iterator[ProvenSession]:
    config = SessionConfig(engine="onnxruntime", device=CPU, threads=1, spin=False, reason="test")
    lowered = lower_version(folder, config, cache)
    with lowered.session:
        yield lowered


def test_the_part_that_is_requested_is_computed_alone(lowered: ProvenSession, logged: list[str]) -> None:
    session = lowered.session
    with pytest.raises(SignatureError):
        session.run({"x": BAD}, ["good"])  # the whole graph runs, and computes the other output, too
    session.settle()  # type: ignore[attr-defined]
    np.testing.assert_array_equal(session.run({"x": BAD}, ["good"])["good"], BAD + 1)
    np.testing.assert_array_equal(session.run({"x": GOOD}, ["fragile"])["fragile"], GOOD)
    np.testing.assert_array_equal(session.run({"x": GOOD})["good"], GOOD + 1)
    assert logged[0] == "output good alone: a graph of that part answers"


def test_a_file_that_was_replaced_is_not_read_again(lowered: ProvenSession, folder: Path, logged: list[str]) -> None:
    (folder / "model.onnx").write_bytes(zoo.sum_and_difference().SerializeToString())
    session = lowered.session
    for _ in range(2):
        np.testing.assert_array_equal(session.run({"x": GOOD}, ["good"])["good"], GOOD + 1)
        session.settle()  # type: ignore[attr-defined]
    assert "no graph for output good alone" in logged[0]


def test_a_part_that_saves_nothing_is_not_built(tmp_path: Path, logged: list[str], cache: ArtifactCache) -> None:
    nodes = [helper.make_node("Neg", ["x"], ["y"]), *(helper.make_node("Neg", [a], [b]) for a, b in CHAIN)]
    outputs = [zoo.value("y", ("batch", 2)), zoo.value("y30", ("batch", 2))]
    folder = zoo.add(tmp_path, "chain", zoo.model(nodes, [zoo.value("x", ("batch", 2))], outputs))
    config = SessionConfig(engine="onnxruntime", device=CPU, threads=1, spin=False, reason="test")
    lowered = lower_version(folder, config, cache)
    with lowered.session as session:
        session.run({"x": np.ones((1, 2), np.float32)}, ["y30"])
    assert logged[-1:] == ["output y30 alone: the whole graph answers"]


CHAIN = [("y" if number == 1 else f"y{number - 1}", f"y{number}") for number in range(1, 31)]


class TestKeepOutputs:
    def test_keeps_inputs_and_outputs(self, folder: Path, tmp_path: Path) -> None:
        target = tmp_path / "part.onnx"
        assert keep_outputs(folder / "model.onnx", ["good"], target) == 0.5
        graph = onnx.load(target).graph
        assert [node.op_type for node in graph.node] == ["Add"]
        assert [tensor.name for tensor in graph.initializer] == ["one"]
        assert [value.name for value in graph.input] == ["x"]

    def test_external_weights_are_found(self, tmp_path: Path) -> None:
        folder = zoo.add_external(tmp_path, "external")
        target = tmp_path / "part" / "model.onnx"
        target.parent.mkdir()
        keep_outputs(folder / "model.onnx", ["y"], target)
        onnx.checker.check_model(onnx.load(target), full_check=True)

    def test_an_unknown_output(self, folder: Path, tmp_path: Path) -> None:
        with pytest.raises(LoweringError, match="has no output 'bad'"):
            keep_outputs(folder / "model.onnx", ["bad"], tmp_path / "part.onnx")

    def test_a_damaged_file(self, tmp_path: Path) -> None:
        (tmp_path / "model.onnx").write_bytes(b"\xff" * 20)
        with pytest.raises(LoweringError, match="cannot read"):
            keep_outputs(tmp_path / "model.onnx", ["y"], tmp_path / "part.onnx")
