"""Channels first, and what belongs to channels."""

from __future__ import annotations

import numpy as np
import pytest
from translating import op

from graphkiln_backend.graph.errors import ConversionError
from graphkiln_converters.oneflow.job import TensorType
from graphkiln_converters.oneflow.layout import align_to_axis, check_channels_first

IMAGES = TensorType((2, 3, 8, 6), "f32")
BIAS = TensorType((3,), "f32")


def test_channels_first_is_the_default() -> None:
    check_channels_first(op(IMAGES))
    check_channels_first(op(IMAGES, data_format="channels_first"))


@pytest.mark.parametrize("layout", ["channels_last", "NHWC", ""])
def test_any_other_layout_is_rejected_with_the_fix(layout: str) -> None:
    with pytest.raises(ConversionError, match="save the graph without ONEFLOW_ENABLE_NHWC"):
        check_channels_first(op(IMAGES, data_format=layout))


@pytest.mark.parametrize(("axis", "shape"), [(0, [2, 1, 1, 1]), (1, [3, 1, 1]), (2, [8, 1])])
def test_a_weight_is_reshaped_without_a_node(axis: int, shape: list[int]) -> None:
    one = op(IMAGES, BIAS)
    weight = one.graph.weight("bias", np.arange(IMAGES.shape[axis] or 0, dtype="f4"))
    aligned = align_to_axis(one, weight, axis)
    assert list(aligned.shape or ()) == shape
    assert one.graph.nodes == []
    assert align_to_axis(one, weight, axis) is aligned


def test_a_computed_bias_is_reshaped_by_a_node() -> None:
    one = op(IMAGES, BIAS)
    one.inputs[1].name = "computed"
    aligned = align_to_axis(one, one.inputs[1], 1)
    assert [node.op_type for node in one.graph.nodes] == ["Reshape"]
    assert list(aligned.shape or ()) == [3, 1, 1]


def test_along_the_last_axis_nothing_changes() -> None:
    one = op(IMAGES, BIAS)
    assert align_to_axis(one, one.inputs[1], 3) is one.inputs[1]
