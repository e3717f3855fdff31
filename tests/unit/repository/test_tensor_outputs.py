"""Outputs that are not tensors: replaced or left out."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
import zoo
from onnx import TensorProto, helper

from graphkiln_backend.repository.tensor_outputs import find_replaced, with_tensor_outputs


@pytest.mark.parametrize(("labels", "text"), [(("no", "né", "yes"), True), ((3, -1, 7), False)])
def test_zip_map_is_replaced_by_its_input(labels: tuple[str | int, ...], text: bool) -> None:
    proto = zoo.zipped(labels, text=text)
    (output,) = with_tensor_outputs(proto)
    onnx.checker.check_model(proto)
    assert output.classes == labels
    assert [value.name for value in proto.graph.output] == ["label", "probability"]
    assert [node.op_type for node in proto.graph.node] == ["LinearClassifier", "Identity"]
    assert "sequence of maps" in str(output)
    assert ", ".join(map(str, labels)) in str(output)


def test_maps_to_tensor() -> None:
    (output,) = find_replaced(zoo.zipped().graph)
    table = output.to_tensor([{"yes": 0.2, "no": 0.5, "né": 0.3}])
    assert table.dtype == np.float32
    np.testing.assert_allclose(table, [[0.5, 0.3, 0.2]], rtol=1e-6)
    assert output.to_tensor([]).shape == (0, 3)
    with pytest.raises(TypeError, match="one map for each row"):
        output.to_tensor(np.ones(3))


def test_sequence_beside_a_tensor_is_left_out() -> None:
    proto = zoo.with_tensor_and_sequence()
    (output,) = with_tensor_outputs(proto)
    assert str(output) == ("output 'parts' is left out: it is a sequence of tensors, and Triton carries tensors only")
    assert [node.op_type for node in proto.graph.node] == ["Add"]


def test_single_sequence_is_kept() -> None:
    proto = zoo.with_sequence_output()
    assert with_tensor_outputs(proto) == ()
    assert [node.op_type for node in proto.graph.node] == ["SequenceConstruct"]


def test_nodes_used_in_subgraphs_are_kept() -> None:
    shape = ("batch", 3)
    branch = helper.make_graph([helper.make_node("Add", ["used", "used"], ["r"])], "b", [], [zoo.value("r", shape)])
    nodes = [
        helper.make_node("Neg", ["x"], ["used"]),
        helper.make_node("If", ["c"], ["y"], then_branch=branch, else_branch=branch),
        helper.make_node("SequenceConstruct", ["x"], ["parts"]),
    ]
    inputs = [zoo.value("x", shape), zoo.value("c", (), TensorProto.BOOL)]
    parts = helper.make_tensor_sequence_value_info("parts", TensorProto.FLOAT, None)
    proto = zoo.model(nodes, inputs, [zoo.value("y", shape), parts])
    with_tensor_outputs(proto)
    assert [node.op_type for node in proto.graph.node] == ["Neg", "If"]
