"""Configuration of an image model, derived from that of its tensor model."""

from __future__ import annotations

import pytest
from google.protobuf import text_format

from graphkiln_backend.graph.contract import Contract, Contracts
from graphkiln_backend.graph.errors import RepositoryError
from graphkiln_backend.graph.preprocess import Preprocess
from graphkiln_backend.repository.config import ModelConfigProto
from graphkiln_backend.repository.image_config import image_config, is_stacked, parts_of

TENSORS = """
    name: "cats" backend: "graphkiln" max_batch_size: 8 version_policy { all { } }
    input { name: "x" data_type: TYPE_FP32 dims: [3, 8, 8] }
    output { name: "y" data_type: TYPE_FP32 dims: [5] label_filename: "labels.txt" }
"""


def config(text: str = TENSORS, *, spec: bool = True) -> ModelConfigProto:
    parsed: ModelConfigProto = text_format.Parse(text, ModelConfigProto())
    if spec:
        parsed.parameters["preprocess"].string_value = Preprocess(crop=(8, 8)).to_json()
    return parsed


def test_one_input_and_the_same_outputs() -> None:
    made = image_config(config(), instances=3)
    assert (made.name, made.backend, made.max_batch_size) == ("cats.images", "python", 8)
    assert [(tensor.name, tensor.data_type, [*tensor.dims]) for tensor in made.input] == [("IMAGE", 13, [1])]
    assert made.output == config().output
    assert made.instance_group[0].count == 3
    assert made.version_policy.HasField("all")
    assert made.HasField("dynamic_batching")
    assert is_stacked(made)


def test_contracts_replace_a_common_preprocess() -> None:
    said = {str(size): Contract(preprocess=Preprocess(crop=(size, size))) for size in (8, 9)}
    varied = config(spec=False)
    varied.parameters["contracts"].string_value = Contracts.of(said).to_json()
    assert image_config(varied, instances=1).parameters["contracts"] == varied.parameters["contracts"]


@pytest.mark.parametrize(
    ("dims", "stacked", "images"), [("3, 8, 8", False, 1), ("-1, 3, 8, 8", True, -1), ("2, 3, 8, 8", True, 2)]
)
def test_tensor_model_without_batching(dims: str, stacked: bool, images: int) -> None:
    whole = config(TENSORS.replace("max_batch_size: 8", "").replace("dims: [3, 8, 8]", f"dims: [{dims}]"))
    made = image_config(whole, instances=1)
    assert (is_stacked(made), [*made.input[0].dims]) == (stacked, [images])
    assert not made.HasField("dynamic_batching")


@pytest.mark.parametrize(
    ("text", "spec", "reason"),
    [
        (TENSORS, False, "no preprocessing"),
        (TENSORS + 'input { name: "more" }', True, "one input, got 2"),
        (TENSORS + "sequence_batching { }", True, "sequence batching"),
        (TENSORS.replace("3, 8, 8", "192"), True, "dims of an image"),
    ],
)
def test_unsupported_tensor_models(text: str, spec: bool, reason: str) -> None:
    with pytest.raises(RepositoryError, match=reason):
        image_config(config(text, spec=spec), instances=1)


@pytest.mark.parametrize(
    ("groups", "has_gpu", "parts"),
    [
        ("", False, 1),
        ("instance_group { count: 3 }", False, 3),
        ("instance_group { count: 2 kind: KIND_CPU } instance_group { kind: KIND_CPU }", True, 3),
        ("instance_group { count: 2 }", True, 1),
        ("instance_group { count: 2 kind: KIND_GPU }", False, 1),
    ],
)
def test_batch_is_split_between_cpu_instances(groups: str, has_gpu: bool, parts: int) -> None:
    assert parts_of(image_config(config(TENSORS + groups), instances=1, has_gpu=has_gpu)) == parts
