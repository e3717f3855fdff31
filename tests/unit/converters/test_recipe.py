"""The recipe: what it takes, what it refuses, and what it was called before."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from graphkiln_backend.graph.text import fault_in_name
from graphkiln_converters.recipe import Flag, Recipe, name_of


def recipe(**fields: Any) -> Recipe:
    return Recipe.model_validate({"source": "model.onnx", "name": "m", **fields})


class TestFields:
    @pytest.mark.parametrize(
        ("field", "value"),
        [
            ("version", 0),
            ("top_k", -1),
            ("max_batch_size", 0),
            ("max_batch_size", 1 << 31),
            ("top_k", 1 << 31),
            ("relative_l2", 0),
            ("relative_l2", -0.5),
            ("name", ""),
            ("name", "a/b"),
            ("name", "a b"),
            ("name", "../m"),
            ("name", ".."),
            ("name", "."),
            ("name", "a\n"),
            ("name", "a\x1b[1m"),
            ("name", "m" * 256),
            ("version", 1 << 63),
            ("amp", "O4"),
            ("layout", "hwc"),
            ("input", "uint8"),
            ("precision", "tf32"),
            ("calibration_method", "max"),
            ("preprocess", "resize"),
            ("softmax", "perhaps"),
            ("out_indices", ["a"]),
            ("unknown", 1),
        ],
    )
    def test_what_is_refused(self, field: str, value: object) -> None:
        with pytest.raises(ValidationError):
            recipe(**{field: value})


class TestShapes:
    def test_more_than_any_memory_holds(self) -> None:
        with pytest.raises(ValidationError, match="is more than 2147483647 elements a sample"):
            recipe(shape=["a=65536x32768"])


class TestBoxes:
    @pytest.mark.parametrize(
        "fields",
        [
            {"head": "yolov5"},
            {"source": "torchvision:x", "task": "detection", "iou_threshold": 0.5},
            {"task": "segmentation", "boxes": "xyxy"},
            {"max_detections": 5},
        ],
    )
    def test_options_of_files_are_not_ignored_elsewhere(self, fields: dict[str, Any]) -> None:
        with pytest.raises(ValidationError, match=r"is for FILE\.onnx with --task detection"):
            recipe(**{"source": "model.onnx", **fields})

    def test_they_are_plain_data_in_a_recipe(self) -> None:
        made = recipe(source="m.onnx", task="detection", head="end-to-end", boxes="yxyx-unit", score_threshold=0.1)
        assert (made.frozen()["head"], made.frozen()["boxes"]) == ("end-to-end", "yxyx-unit")
        assert Recipe.model_validate(made.frozen()) == made


class TestFrozen:
    def test_reads_back_as_the_same(self) -> None:
        made = recipe(
            precision="bf16", out_indices=[1, 2], preprocess={"mean": [0.5]}, samples="a.npz", relative_l2=0.1,
            shape=["3x4x4"], keep_fp32=["Conv*"], version=3,
        )  # fmt: skip
        assert Recipe.model_validate(made.frozen()) == made


def test_only_these_fields_have_no_flag() -> None:
    """A new field without a flag is a decision."""
    flagged = {
        name for name, field in Recipe.model_fields.items() if any(isinstance(item, Flag) for item in field.metadata)
    }
    assert set(Recipe.model_fields) - flagged == {"source", "quantize_bias", "quantize_ends"}


# The names that sources suggest are names that models can have.


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
        ("torchscript:scripted.pt", "scripted"),
        ("keras:store/flowers/1/model.keras", "flowers"),
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
