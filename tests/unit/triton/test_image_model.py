"""Model class of `NAME.images`, with a fake Triton and a fake tensor model."""

from __future__ import annotations

import io
from types import SimpleNamespace
from typing import Any

import fake_triton
import numpy as np
import pytest
from fake_triton import Tensor, TritonError, TritonModelException
from google.protobuf import json_format
from PIL import Image

from graphkiln_backend.graph.contract import CONTRACTS, Contract, Contracts
from graphkiln_backend.graph.dtypes import DType
from graphkiln_backend.graph.preprocess import Preprocess
from graphkiln_backend.repository.config import ModelConfigProto
from graphkiln_backend.repository.image_config import image_config
from graphkiln_backend.triton import image_model as module
from graphkiln_backend.triton.image_model import TritonPythonModel

CONTRACT = Contract(preprocess=Preprocess(color="L", dtype=DType.UINT8, resize=(2, 2)))


def tensor_config(contracts: Contracts) -> ModelConfigProto:
    config = ModelConfigProto(name="cats", backend="graphkiln", max_batch_size=4)
    config.input.add(name="x", data_type=2, dims=[1, 2, 2])
    config.output.add(name="y", data_type=11, dims=[1])
    config.parameters[CONTRACTS].string_value = contracts.to_json()
    return config


def arguments(version: str = "3") -> dict[str, str]:
    config = image_config(tensor_config(Contracts.of({"3": CONTRACT})), instances=1)
    text = json_format.MessageToJson(config, preserving_proto_field_name=True)
    names = {
        "model_name": "cats.images",
        "model_instance_name": "cats.images_0",
        "model_version": version,
        "model_repository": "/nowhere/cats.images",
    }
    return {"model_config": text, **names}


class FakeCall:
    """A request to the tensor model, which returns the first pixel and fails for black."""

    made: list[dict[str, Any]] = []  # noqa: RUF012 - of the process

    def __init__(self, **options: Any) -> None:
        self.made.append(options)
        self._samples = options["inputs"][0].as_numpy()

    def exec(self) -> SimpleNamespace:
        pixels = self._samples[:, 0, 0, 0].astype(np.float32).reshape(-1, 1)
        error = SimpleNamespace(code=lambda: TritonError.UNAVAILABLE, message=lambda: "gone")
        return SimpleNamespace(
            has_error=lambda: not pixels.all(), error=lambda: error, output_tensors=lambda: [Tensor("y", pixels)]
        )


@pytest.fixture
def pb_utils(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    FakeCall.made.clear()
    replaced = SimpleNamespace(
        InferenceRequest=FakeCall,
        Tensor=Tensor,
        TritonError=TritonError,
        TritonModelException=TritonModelException,
        deserialize_bytes_tensor=lambda encoded: encoded,
    )
    monkeypatch.setattr(module, "pb_utils", replaced)
    monkeypatch.setattr(module.os, "nice", lambda _: None)
    monkeypatch.setattr(module, "lift_memory_limit", lambda: None)
    return replaced


def request(value: int) -> fake_triton.InferenceRequest:
    file = io.BytesIO()
    Image.new("L", (2, 2), value).save(file, "PNG")
    return fake_triton.InferenceRequest({"IMAGE": np.array([[file.getvalue()]], dtype=object)})


@pytest.mark.usefixtures("pb_utils")
class TestModel:
    def test_samples_go_to_the_same_version_with_its_contract(self) -> None:
        model = TritonPythonModel()
        model.initialize(arguments())
        first, second = model.execute([request(7), request(9)])
        model.finalize()
        assert (first.outputs["y"].tolist(), second.outputs["y"].tolist()) == ([[7]], [[9]])
        (call,) = FakeCall.made
        assert (call["model_name"], call["model_version"]) == ("cats", 3)
        assert call["parameters"] == {"contract": CONTRACT.digest}
        assert call["inputs"][0].name() == "x"

    def test_error_of_the_tensor_model_keeps_its_code(self) -> None:
        model = TritonPythonModel()
        model.initialize(arguments())
        (response,) = model.execute([request(0)])
        model.finalize()
        assert (response.error.code, response.error.message) == (TritonError.UNAVAILABLE, "gone")

    def test_version_without_preprocessing_is_not_loaded(self) -> None:
        with pytest.raises(TritonModelException, match=r"cats\.images: .*publishes no preprocessing"):
            TritonPythonModel().initialize(arguments(version="4"))
