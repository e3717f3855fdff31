"""Graphs that draw random numbers, or were exported in training mode."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
import zoo
from onnx import TensorProto, helper, parser

from graphkiln_backend.repository.training_mode import draws_numbers, find_training

STATISTICS = "o = Constant<value = float[4] {1,1,1,1}>() z = Constant<value = float[4] {0,0,0,0}>() "
RATIO = "r = Constant<value = float {0.5}>() "
TRAINS = "t = Constant<value = bool {1}>() "
TESTS = "t = Constant<value = bool {0}>() "


def graph(folder: Path, body: str, opset: int = 18, inputs: str = "float[n,4] x") -> Path:
    text = f'<ir_version: 8, opset_import: ["" : {opset}]> g ({inputs}) => (float[n,4] y) {{ {body} }}'
    onnx.save(parser.parse_model(text), folder / "model.onnx")
    return folder / "model.onnx"


@pytest.mark.parametrize(
    ("body", "opset"),
    [
        ("r = RandomUniformLike(x) y = Add(x, r)", 18),
        (f"{RATIO}{TRAINS} y = Dropout(x, r, t)", 18),
        (f"{TRAINS} y = Dropout(x, , t)", 18),
        ("y = Dropout(x)", 6),
    ],
)
def test_random_graphs(tmp_path: Path, body: str, opset: int) -> None:
    assert draws_numbers(graph(tmp_path, body, opset))


@pytest.mark.parametrize(
    ("body", "opset"),
    [
        ("y = Relu(x)", 18),
        (f"{RATIO}{TESTS} y = Dropout(x, r, t)", 18),
        (f"{RATIO} y = Dropout(x, r)", 18),
        ("y = Dropout<ratio = 0.5>(x)", 7),
        ("y = Dropout<ratio = 0.5, is_test = 1>(x)", 6),
        (f"r = Constant<value = float {{0}}>() {TRAINS} y = Dropout(x, r, t)", 18),
    ],
)
def test_deterministic_graphs(tmp_path: Path, body: str, opset: int) -> None:
    path = graph(tmp_path, body, opset)
    assert (draws_numbers(path), find_training(path)) == (False, "")


def test_training_mode_by_input(tmp_path: Path) -> None:
    path = graph(tmp_path, f"{RATIO} y = Dropout(x, r, t)", inputs="float[n,4] x, bool t")
    assert (draws_numbers(path), find_training(path)) == (True, "")


def test_random_node_in_a_subgraph(tmp_path: Path) -> None:
    inner = helper.make_graph(
        [helper.make_node("RandomUniform", [], ["r"], shape=[1])], "inner", [], [zoo.value("r", (1,))]
    )
    branch = helper.make_node("If", ["x"], ["y"], then_branch=inner, else_branch=inner)
    proto = zoo.model([branch], [zoo.value("x", (), TensorProto.BOOL)], [zoo.value("y", (1,))])
    onnx.save(proto, tmp_path / "model.onnx")
    assert draws_numbers(tmp_path / "model.onnx")


def test_nodes_in_training_mode_are_named(tmp_path: Path) -> None:
    norm = f"{STATISTICS} h, m, v = BatchNormalization<training_mode: int = 1>(x, o, z, z, o) "
    assert find_training(graph(tmp_path, f"{norm} y = Relu(h)")) == "BatchNormalization 'h'"
    path = graph(tmp_path, f"{norm} {RATIO}{TRAINS} y = Dropout(h, r, t)")
    assert find_training(path) == "BatchNormalization 'h' and 1 more"


def test_batch_norm_of_old_opsets(tmp_path: Path) -> None:
    norm = "BatchNormalization(x, o, z, z, o)"
    assert find_training(graph(tmp_path, f"{STATISTICS} y, m, v, a, b = {norm}", 9)) == "BatchNormalization 'y'"
    assert find_training(graph(tmp_path, f"{STATISTICS} y = {norm}", 9)) == ""


def test_statistics_as_inputs(tmp_path: Path) -> None:
    """As in ONNX's own test suite: nothing was learned."""
    body = "y, m, v = BatchNormalization<training_mode: int = 1>(x, o, z, z, o)"
    path = graph(tmp_path, body, inputs="float[n,4] x, float[4] o, float[4] z")
    assert find_training(path) == ""
