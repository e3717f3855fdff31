"""Values of a parsed graph: what is shown of them in errors, and that nobody can change them by the way."""

from __future__ import annotations

import dataclasses

import pytest

from graphkiln_converters.oneflow.job import Job, Opaque, Operation, TensorType
from graphkiln_converters.oneflow.mlir import parse

TEXT = """module {
  oneflow.job @GraphToRun_0(%arg0: tensor<2x3xf32>) -> tensor<2x3xf32> {
    %out = "oneflow.input"(%arg0) {op_name = "in", shape = [2, 3]} : (tensor<2x3xf32>) -> tensor<2x3xf32>
    oneflow.return %out : tensor<2x3xf32>
  }
}
"""


@pytest.mark.parametrize(
    ("shape", "element", "text"),
    [
        ((2, 3), "f32", "tensor<2x3xf32>"),
        ((), "si64", "tensor<si64>"),
        ((None, 224), "f16", "tensor<?x224xf16>"),
        ((None,), "i1", "tensor<?xi1>"),
        ((0, 4), "bf16", "tensor<0x4xbf16>"),
    ],
)
def test_a_type_is_shown_as_mlir_writes_it(shape: tuple[int | None, ...], element: str, text: str) -> None:
    assert str(TensorType(shape, element)) == text


def test_what_is_shown_can_be_read_again() -> None:
    """The text of a type stands in errors: whoever searches the file for it finds it."""
    job = parse(TEXT)
    (operation,) = job.operations
    for type_ in (*job.arguments.values(), *operation.operand_types, *operation.result_types):
        assert str(type_) in TEXT


def test_operations_keep_their_line_and_names() -> None:
    job = parse(TEXT)
    (operation,) = job.operations
    assert job.name == "GraphToRun_0"
    assert list(job.arguments) == list(operation.operands)
    assert list(job.returns) == list(operation.results)
    assert (operation.kind, operation.line) == ("input", 3)
    assert TEXT.splitlines()[operation.line - 1].lstrip().startswith("%out")


@pytest.mark.parametrize("kind", [Job, Operation, TensorType, Opaque])
def test_values_are_frozen(kind: type) -> None:
    assert dataclasses.is_dataclass(kind)
    (first, *_) = dataclasses.fields(kind)
    value = object.__new__(kind)
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(value, first.name, "another")


def test_equal_types_are_one_key() -> None:
    assert len({TensorType((1, 2), "f32"), TensorType((1, 2), "f32"), TensorType((2, 1), "f32")}) == 2
    assert Opaque("device") != Opaque("parallel")
