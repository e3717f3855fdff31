"""Which texts a graph knows."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import zoo
from onnx import TensorProto, helper

from graphkiln_converters.sources.onnx_file import known_words


def graph_of(*nodes: onnx.NodeProto, **constants: Any) -> onnx.GraphProto:
    inputs = [zoo.value(name, ("batch", 1), TensorProto.STRING) for name in ("color", "size")]
    return zoo.model(list(nodes), inputs, [zoo.value("y", ("batch", 1))], constants).graph


def test_each_input_has_the_words_of_those_that_read_it() -> None:
    graph = graph_of(
        helper.make_node("Identity", ["color"], ["same"]),
        helper.make_node("OneHotEncoder", ["same"], ["a"], cats_strings=["red", "gr\u00fcn"], zeros=1),
        helper.make_node("LabelEncoder", ["size"], ["b"], keys_strings=["S", "L"], values_strings=["small", "large"]),
        helper.make_node("LinearClassifier", ["a"], ["y"], classlabels_strings=["cheap", "dear"]),
    )
    assert known_words(graph, "color") == ("red", "gr\u00fcn")
    assert known_words(graph, "size") == ("S", "L")
    assert known_words(graph, "nonesuch") == ()


def test_words_that_text_is_compared_with() -> None:
    graph = graph_of(helper.make_node("Equal", ["color", "blue"], ["y"]), blue=np.array(["blue"], np.object_))
    assert known_words(graph, "color") == ("blue",)
