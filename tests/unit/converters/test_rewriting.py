"""The passes that a recipe requests, on a graph."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir
import pytest
from graphs import compute, draw, graph, operators

from graphkiln_backend.graph.errors import ConversionError
from graphkiln_backend.graph.preprocess import Preprocess
from graphkiln_converters.convert import rewrite
from graphkiln_converters.recipe import Recipe

SPEC = Preprocess(std=(2.0, 3.0, 4.0))


def network() -> onnx_ir.Model:
    text = """(float[b,3,4,4] image) => (float[b,3] scores, float[b,3,4,4] map) {
        map = Identity(image)
        p = GlobalAveragePool(map)
        scores = Flatten(p)
    }"""
    return graph(text)


def recipe(**fields: Any) -> Recipe:
    return Recipe.model_validate({"source": "text", "name": "m", **fields})


def ran(**fields: Any) -> list[str]:
    rewritten = rewrite(network(), recipe(**fields), SPEC)
    return [report.name for report in rewritten.reports if report.ran]


def test_every_wish_of_the_recipe_is_a_pass() -> None:
    fields = {"outputs": ["scores"], "softmax": True, "top_k": 2, "input": "uint8-nhwc"}
    requested = ["prune-outputs", "rename", "softmax", "top-k", "input-uint8-nhwc"]
    assert [name for name in ran(**fields) if name in requested] == requested
    assert "nhwc" in ran(layout="nhwc")
    assert "rename" not in ran(keep_names=True)


def test_the_graph_is_rewritten_in_place() -> None:
    model, image = network(), draw(2, 3, 4, 4)
    rewrite(model, recipe(), None)
    np.testing.assert_allclose(compute(model, INPUT_0=image)["OUTPUT_0"], image.mean(axis=(2, 3)), rtol=1e-5, atol=1e-6)
    assert operators(model).count("Identity") == 1, "an input that is an output stays two values"


def test_what_is_skipped_does_not_run() -> None:
    assert "clean-up" not in ran(skip=["clean-up"])
    assert "rename" not in ran(skip=["rename"])
    with pytest.raises(ConversionError, match="there is no pass 'renames' to skip"):
        ran(skip=["renames"])


def test_the_preprocessing_is_embedded_only_when_requested() -> None:
    model = network()
    edge = rewrite(model, recipe(), SPEC).edge
    assert edge.to_graph_preprocess(SPEC) == SPEC
    assert str(model.graph.inputs[0].dtype) == "FLOAT"


@pytest.mark.parametrize("given", ["uint8-nhwc", "encoded"])
def test_bytes_need_to_know_how_they_become_the_input(given: str) -> None:
    with pytest.raises(ConversionError, match=f"--input {given}: it is not known how an image becomes") as caught:
        rewrite(network(), recipe(input=given), None)
    assert "--preprocess" in caught.value.hint


@pytest.mark.parametrize(
    "text",
    [
        "(float[b,3] x) => (float[b,3] y) { y = Relu(x) }",
        "(float[b,3,4,4] x, float[b,3,4,4] z) => (float[b,3,4,4] y) { y = Add(x, z) }",
    ],
)
def test_bytes_need_an_image(text: str) -> None:
    with pytest.raises(ConversionError, match="--input uint8-nhwc: the input is no FP32 image") as caught:
        rewrite(graph(text), recipe(input="uint8-nhwc"), SPEC)
    assert caught.value.hint == "it is for models with one FP32 image as their input"


def test_an_output_that_is_not_there() -> None:
    with pytest.raises(ConversionError, match="did you mean 'scores'"):
        rewrite(network(), recipe(outputs=["score"]), None)
