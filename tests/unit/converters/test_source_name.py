"""The names that sources suggest are names that models can have."""

from __future__ import annotations

import pytest

from graphkiln_backend.graph.text import fault_in_name
from graphkiln_converters.recipe import name_of


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("torchvision:resnet101", "resnet101"),
        ("timm:resnet34.a1_in1k", "resnet34.a1_in1k"),
        ("timm:hf_hub:timm/resnet34", "resnet34"),
        ("huggingface:google-bert/bert-base-uncased", "bert-base-uncased"),
        ("huggingface:/data/my bert/", "my-bert"),
        ("python:models/net.py:make_net", "make_net"),
        ("python:package.module:factory", "factory"),
        ("exported/Net v2.pt2", "Net-v2"),
        ("net.onnx", "net"),
        ("store/digits/1/model.onnx", "digits"),
        ("model.onnx", "model"),
        ("oneflow:saved/tokens", "tokens"),
        ("oneflow:store/resnet/1/model", "resnet"),
        ("/weird/.-.onnx", "weird"),
        ("caf\u00e9.onnx", "caf"),
        ("x" * 300 + ".onnx", "x" * 128),
    ],
)
def test_a_source_suggests_a_name(source: str, name: str) -> None:
    assert name_of(source) == name
    assert not fault_in_name(name)


@pytest.mark.parametrize("source", ["", "torchvision:", "/", "\u00e4.onnx"])
def test_some_suggest_none(source: str) -> None:
    assert name_of(source) == ""


@pytest.mark.parametrize(
    "source", ["s3://bucket/resnet.onnx", "gs://bucket/resnet.onnx", "hf://me/resnet/1/model.onnx"]
)
def test_of_an_address(source: str) -> None:
    assert name_of(source) == "resnet"
