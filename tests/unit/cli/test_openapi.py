"""`graphkiln openapi`: documents of models of every kind, judged by openapi-spec-validator."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import zoo
from commands import RunVerb
from jsonschema import Draft202012Validator
from openapi_spec_validator import OpenAPIV31SpecValidator

from graphkiln_backend.graph.image_model import ACCEPT_IMAGES_LINE


@pytest.fixture
def document(run: RunVerb) -> Any:
    def document_of(path: Path, *options: str) -> Any:
        finished = run("openapi", path, *options)
        assert finished.code == 0, finished.err
        found = json.loads(finished.out)
        OpenAPIV31SpecValidator(found).validate()
        return found

    return document_of


def faults(document: Any, schema: str, value: Any) -> list[str]:
    """Faults of a value by one of the document's schemas."""
    rules = {**document, "$ref": f"#/components/schemas/{schema}"}
    return [error.message for error in Draft202012Validator(rules).iter_errors(value)]


def tensor(name: str, datatype: str, shape: list[int], data: list[Any]) -> dict[str, Any]:
    return {"name": name, "datatype": datatype, "shape": shape, "data": data}


class TestDocument:
    def test_a_classifier(self, document: Any, repository: Path) -> None:
        found = document(repository / "model_repository" / "digits", "--server", "https://models.example/")
        assert found["servers"] == [{"url": "https://models.example"}]
        assert [*found["paths"]] == [
            "/v2/health/live",
            "/v2/health/ready",
            "/v2/models/digits",
            "/v2/models/digits/ready",
            "/v2/models/digits/infer",
        ]
        schemas = found["components"]["schemas"]
        assert schemas["Input0"]["x-preprocess"]["crop"] == [32, 32]
        assert schemas["Output0"]["x-labels"][7] == "seven"
        pixels = [0.0] * 1024
        assert faults(found, "InferRequest", {"inputs": [tensor("INPUT_0", "FP32", [1, 1, 32, 32], pixels)]}) == []
        for wrong in (
            tensor("INPUT_1", "FP32", [1, 1, 32, 32], pixels),
            tensor("INPUT_0", "FP64", [1, 1, 32, 32], pixels),
            tensor("INPUT_0", "FP32", [33, 1, 32, 32], pixels),  # more than a batch
            tensor("INPUT_0", "FP32", [1, 32, 32], pixels),
            tensor("INPUT_0", "FP32", [1, 1, 32, 31], pixels),
            tensor("INPUT_0", "FP32", [1, 1, 32, 32], ["0"]),
        ):
            assert faults(found, "InferRequest", {"inputs": [wrong]}), wrong

    def test_a_version_by_number(self, document: Any, repository: Path) -> None:
        found = document(repository / "model_repository" / "digits" / "1")
        assert "/v2/models/digits/versions/1/infer" in found["paths"]

    def test_a_detector(self, document: Any, repository: Path) -> None:
        found = document(repository / "model_repository" / "scenes-detector")
        task, schemas = found["info"]["x-task"], found["components"]["schemas"]
        assert task["kind"] == "detection"
        (classes,) = (each for each in schemas.values() if each.get("x-labels"))
        assert classes["properties"]["name"]["const"] == task["classes"]

    def test_encoded_images(self, document: Any, digits: Path, tmp_path: Path) -> None:
        shutil.copytree(digits, tmp_path / "digits")
        with (tmp_path / "digits" / "config.pbtxt").open("a") as config:
            config.write(ACCEPT_IMAGES_LINE)
        image = document(tmp_path / "digits")["paths"]["/v2/models/digits.images/infer"]["post"]
        assert [*image["requestBody"]["content"]] == ["application/octet-stream"]
        assert "JPEG" in image["requestBody"]["content"]["application/octet-stream"]["schema"]["description"]

    def test_tensors_of_every_type_of_json(self, document: Any, tmp_path: Path) -> None:
        names = [name for name in zoo.DTYPES if name not in ("FP16", "BF16")]
        zoo.add(tmp_path, "types", zoo.identities(names), "max_batch_size: 4")
        found = document(tmp_path / "types")
        limits: dict[str, list[Any]] = {
            "BOOL": [True, False], "INT8": [-128, 127], "INT64": [-(2**63), 2**63 - 1], "UINT16": [0, 65535],
            "UINT64": [0, 2**64 - 1], "FP64": [-1e308, 0.5], "BYTES": ["a", ""],
        }  # fmt: skip
        request = [tensor(f"{name}_in", name, [1, 2], limits.get(name, [0, 1])) for name in names]
        assert faults(found, "InferRequest", {"inputs": request}) == []
        assert faults(found, "InferRequest", {"inputs": request[1:]})
        for name, values in (("BOOL", [1]), ("INT8", [-129]), ("UINT16", [65536]), ("UINT64", [-1]), ("BYTES", [1])):
            assert faults(found, f"Input{names.index(name)}", tensor(f"{name}_in", name, [1, 1], values)), name

    @pytest.mark.parametrize("name", ["FP16", "BF16"])
    def test_types_that_json_does_not_have(self, document: Any, tmp_path: Path, name: str) -> None:
        zoo.add(tmp_path, "half", zoo.identity((3,), zoo.DTYPES[name]))
        found = document(tmp_path / "half")
        infer = found["paths"]["/v2/models/half/infer"]["post"]
        assert [*infer["requestBody"]["content"]] == ["application/octet-stream"]
        assert [*infer["responses"]["200"]["content"]] == ["application/octet-stream"]
        declared = {"name": "x", "datatype": name, "shape": [3], "parameters": {"binary_data_size": 6}}
        assert faults(found, "InferRequest", {"inputs": [declared]}) == []  # the JSON part of a binary body
        assert faults(found, "InferRequest", {"inputs": [tensor("x", name, [3], [1, 2, 3])]})

    def test_texts_and_classes(self, document: Any, tmp_path: Path) -> None:
        zoo.add(tmp_path, "words", zoo.words())
        found = document(tmp_path / "words")
        assert faults(found, "Input1", tensor("text", "BYTES", [2, 1], ["a", "b"])) == []
        best = {"outputs": [tensor("word", "BYTES", [1], ["0.9:7:seven"])], "model_name": "m", "model_version": "1"}
        assert faults(found, "InferResponse", best) == []

    def test_an_optional_input(self, document: Any, tmp_path: Path) -> None:
        rows = 'input [{ name: "x" data_type: TYPE_FP32 dims: 3 }, { name: "bias" data_type: TYPE_FP32 dims: 1 }]'
        zoo.add(tmp_path, "bias", zoo.with_optional_bias(), rows)
        found = document(tmp_path / "bias")
        x, bias = tensor("x", "FP32", [3], [1, 2, 3]), tensor("bias", "FP32", [1], [1])
        for inputs in ([x], [x, bias]):
            assert faults(found, "InferRequest", {"inputs": inputs}) == []
        assert faults(found, "InferRequest", {"inputs": []})


class TestErrors:
    @pytest.mark.parametrize(
        ("path", "reason"),
        [
            ("none", "there is no file or folder"),
            ("model_repository/digit", "digits"),  # did you mean
            ("model_repository", "is a model store, not a model"),
            ("docs/digits", "has no version folder"),
        ],
    )
    def test_no_model(self, run: RunVerb, repository: Path, path: str, reason: str) -> None:
        finished = run("openapi", repository / path)
        assert (finished.code, finished.out) == (2, "")
        assert reason in finished.err

    def test_a_model_of_another_backend(self, run: RunVerb, tmp_path: Path) -> None:
        zoo.add(tmp_path, "other", zoo.identity(("n", 3)), 'backend: "python"')
        finished = run("openapi", tmp_path / "other")
        assert (finished.code, finished.out) == (2, "")
        assert "backend 'python'" in finished.err

    @pytest.mark.parametrize("url", ["grpc://localhost:8001", "localhost:8000", "http://"])
    def test_an_address_that_is_not_http(self, run: RunVerb, repository: Path, url: str) -> None:
        finished = run("openapi", repository / "model_repository" / "digits", "--server", url)
        assert (finished.code, finished.out) == (2, "")
        assert "--server: expected http" in finished.err
