"""What a node says, and what ONNX says where it says nothing."""

from __future__ import annotations

import pytest
from graphs import graph

from graphkiln_backend.passes.batch_axis import find_attribute


@pytest.mark.parametrize(
    ("node", "name", "opset", "expected"),
    [
        ("y = Softmax<axis=0>(x)", "axis", 18, 0),
        ("y = Softmax(x)", "axis", 18, -1),
        ("y = Softmax(x)", "axis", 11, 1),
        ("y = Transpose(x)", "perm", 18, None),
        ("y = Softmax(x)", "layout", 18, None),
    ],
)
def test_what_is_not_written_is_the_default_of_its_opset(
    node: str, name: str, opset: int, expected: int | None
) -> None:
    model = graph(f"(float[2,2] x) => (float[2,2] y) {{ {node} }}", opset=opset)
    found = find_attribute(model.graph[0], name, opset)
    assert (found and found.as_int()) == expected
