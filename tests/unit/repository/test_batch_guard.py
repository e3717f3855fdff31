"""The dimension that keeps a request of 2^32 rows from breaking a batch of others."""

from __future__ import annotations

import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2 as pb

from graphkiln_backend.graph.dtypes import DType
from graphkiln_backend.graph.signature import Signature, TensorSpec
from graphkiln_backend.repository.batch_guard import guard_batch
from graphkiln_backend.repository.config import complete
from graphkiln_backend.repository.model_config import ModelConfig


def guarded(text: str) -> list[list[int] | None]:
    """The reshape of each input."""
    config = text_format.Parse(text, pb.ModelConfig())
    guard_batch(config)
    return [list(tensor.reshape.shape) if tensor.HasField("reshape") else None for tensor in config.input]


@pytest.mark.parametrize(
    ("tensor", "expected"),
    [
        ("dims: [3, 224, 224]", [1, 3, 224, 224]),
        ("dims: [-1, 3]", [1, -1, 3]),
        ("dims: [1, 32, 32]", None),
        ("dims: [4] reshape { shape: [2, 2] }", [1, 2, 2]),
        ("dims: [4] reshape { shape: [1, 4] }", [1, 4]),
        ("dims: [1] reshape { }", [1]),
        ("dims: [1] reshape { } optional: true", []),
    ],
)
def test_every_input_of_a_batch_is_handed_over_as_one_row(tensor: str, expected: list[int] | None) -> None:
    text = f'max_batch_size: 8 input {{ name: "x" data_type: TYPE_FP32 {tensor} }}'
    assert guarded(text) == [expected]
    config = ModelConfig.from_protobuf(text_format.Parse(text, pb.ModelConfig()), has_gpu=False)
    assert set(config.input_ranks) == {"x"}


def test_all_inputs_are_guarded() -> None:
    assert guarded('max_batch_size: 8 input { name: "x" dims: [2] } input { name: "z" dims: [3] }') == [[1, 2], [1, 3]]


def test_without_a_batch_nothing_is_changed() -> None:
    assert guarded('input { name: "x" dims: [3] }') == [None]


def test_a_guarded_configuration_still_fits_its_graph() -> None:
    spec = TensorSpec(name="x", dtype=DType.FP32, shape=("batch", 3))
    signature = Signature(inputs=(spec,), outputs=(TensorSpec(name="y", dtype=DType.FP32, shape=("batch",)),))
    config = pb.ModelConfig(name="m", max_batch_size=8)
    for _ in range(2):
        complete(config, signature, labels_file=None)
        guard_batch(config)
    assert list(config.input[0].reshape.shape) == [1, 3]
    assert ModelConfig.from_protobuf(config, has_gpu=False).input_ranks == {"x": 3}
