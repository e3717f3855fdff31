"""The inputs and outputs of a compiled graph, which OpenVINO names as it likes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from graphkiln_backend.graph.dtypes import DType
from graphkiln_backend.graph.signature import ANY_RANK, Dim, TensorSpec, free_dim


def first_specs(ports: Sequence[Any]) -> tuple[TensorSpec, ...]:
    """Tensors by the first of their names."""
    return tuple(spec_of(port, port.get_any_name()) for port in ports)


def match(ports: Sequence[Any], specs: Sequence[TensorSpec]) -> dict[str, int]:
    """The index of each input's port, by the input's name; none for inputs that OpenVINO has dropped."""
    if len(ports) == len(specs):
        by_name = [_index(ports, spec.name, index) for index, spec in enumerate(specs)]
        return {spec.name: index for spec, index in zip(specs, by_name, strict=True)}
    named = {spec.name: _index(ports, spec.name, -1) for spec in specs}
    return {name: index for name, index in named.items() if index >= 0}


def _index(ports: Sequence[Any], name: str, otherwise: int) -> int:
    return next((index for index, port in enumerate(ports) if name in port.get_names()), otherwise)


def spec_of(port: Any, name: str) -> TensorSpec:
    """A tensor as OpenVINO sees it.

    Raises:
        ManifestError: Triton cannot carry its element type.
    """
    dtype = DType.from_openvino(port.get_element_type().get_type_name())
    shape = port.get_partial_shape()
    if shape.rank.is_dynamic:
        return TensorSpec(name=name, dtype=dtype, shape=(ANY_RANK,))
    return TensorSpec(name=name, dtype=dtype, shape=tuple(_dim(dim, name, axis) for axis, dim in enumerate(shape)))


def _dim(dim: Any, tensor: str, axis: int) -> Dim:
    return int(dim.get_length()) if dim.is_static else free_dim(tensor, axis)
