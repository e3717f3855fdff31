"""What a saved graph says: OneFlow's job, its operations, and their attributes and types."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Opaque:
    """An attribute or type of a dialect that is not interpreted, by its name."""

    name: str


@dataclass(frozen=True, slots=True)
class TensorType:
    """The type of a value.

    Attributes:
        shape: Sizes; None for a dynamic one.
        element: MLIR's name of the element type, such as `f32` or `si64`.
    """

    shape: tuple[int | None, ...]
    element: str

    def __str__(self) -> str:
        dims = "".join(f"{'?' if dim is None else dim}x" for dim in self.shape)
        return f"tensor<{dims}{self.element}>"


Attribute = bool | int | float | str | list[Any] | dict[str, Any] | TensorType | Opaque


@dataclass(frozen=True, kw_only=True, slots=True)
class Operation:
    """One operation.

    Attributes:
        kind: Its name without the dialect, such as `conv2d`; of another dialect, with it.
        operands: Names of its operands.
        results: Names of its results.
        attributes: Its attributes.
        operand_types: Types of its operands.
        result_types: Types of its results.
        line: Its line in the file, from 1.
    """

    kind: str
    operands: tuple[str, ...]
    results: tuple[str, ...]
    attributes: Mapping[str, Attribute]
    operand_types: tuple[TensorType, ...]
    result_types: tuple[TensorType, ...]
    line: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """A saved graph.

    Attributes:
        name: OneFlow's name of it.
        arguments: Its inputs in the order of the signature, by name.
        operations: In the order of the file.
        returns: Names of the values that it returns, in the order of the signature.
    """

    name: str
    arguments: Mapping[str, TensorType]
    operations: tuple[Operation, ...]
    returns: tuple[str, ...]
