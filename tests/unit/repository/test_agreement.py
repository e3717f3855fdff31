"""Which changes of a signature break the clients of an older version."""

from __future__ import annotations

import pytest
from google.protobuf import text_format

from graphkiln_backend.repository.agreement import find_disagreement
from graphkiln_backend.repository.config import ModelConfigProto

OLD = """
max_batch_size: 8
input { name: "x" data_type: TYPE_FP32 dims: [3, -1] }
input { name: "o" data_type: TYPE_FP32 dims: [1] optional: true }
output { name: "y" data_type: TYPE_FP32 dims: [5] }
"""


def parse(text: str) -> ModelConfigProto:
    return text_format.Parse(text, ModelConfigProto())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("max_batch_size: 8", ""), "it takes no batches"),
        (('"x"', '"z"'), "input 'x' is missing; input 'z' is new"),
        (('"y"', '"z"'), "output 'y' is missing"),
        (("TYPE_FP32 dims: [5]", "TYPE_FP16 dims: [5]"), "output 'y' is FP16 [5], not FP32 [5]"),
        (("dims: [5]", "dims: [7]"), "output 'y' is FP32 [7], not FP32 [5]"),
        (("[3, -1]", "[3, 4]"), "input 'x' is FP32 [3, 4], not FP32 [3, -1]"),
        (("[3, -1]", "[3]"), "input 'x' is FP32 [3], not FP32 [3, -1]"),
        (("optional: true", ""), "input 'o' is no longer optional"),
        (("[3, -1] }", '[3, -1] } input { name: "w" data_type: TYPE_FP32 dims: [1] }'), "input 'w' is new"),
    ],
)
def test_what_breaks_them(change: tuple[str, str], words: str) -> None:
    assert find_disagreement(parse(OLD.replace(*change)), parse(OLD)) == words


@pytest.mark.parametrize(
    "change",
    [
        ("max_batch_size: 8", "max_batch_size: 4"),
        ("dims: [5]", "dims: [-1]"),
        ("[3, -1]", "[-1, -1]"),
        ("dims: [5] }", 'dims: [5] } output { name: "z" data_type: TYPE_FP32 dims: [5] }'),
        ("[3, -1] }", '[3, -1] } input { name: "w" data_type: TYPE_FP32 dims: [1] optional: true }'),
    ],
)
def test_what_does_not(change: tuple[str, str]) -> None:
    assert find_disagreement(parse(OLD.replace(*change)), parse(OLD)) == ""
    assert find_disagreement(parse(OLD), parse(OLD)) == ""
