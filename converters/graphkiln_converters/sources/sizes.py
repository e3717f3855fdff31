"""Sizes of inputs whose dimensions vary: those that the user gives, or else usual ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from graphkiln_backend.graph.errors import ConversionError

USUAL_SIZE = 8
"""Of a dimension that varies and whose size is not given."""


def sizes_of(name: str, dims: Sequence[object], shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
    """Sizes of all dimensions of an input, its batch among them.

    Args:
        name: Of the input.
        dims: Its dimensions; one that is no integer varies.
        shapes: Input name (or empty for the only one) -> sizes that the user gives: of one sample, or of all
            dimensions.

    Raises:
        ConversionError: They are not as many as the input has.
    """
    usual = tuple(map(_usual_size, dims))
    given = shapes.get(name) or shapes.get("") or usual[1:]
    if len(given) == len(usual):
        return given
    if len(given) != len(usual[1:]):
        raise _misfit(name, dims, given, usual[1:])
    return (*usual[:1], *given)


def _usual_size(dim: object) -> int:
    return dim if isinstance(dim, int) else USUAL_SIZE


def _misfit(name: str, dims: Sequence[object], given: Sequence[int], usual: Sequence[int]) -> ConversionError:
    return ConversionError(
        f"--shape: {_spelled(given)} does not fit input '{name}' [{', '.join(map(str, dims))}]",
        hint=f"give the sizes of one sample: {name}={_spelled(usual) or '...'}",
    )


def _spelled(sizes: Sequence[int]) -> str:
    return "x".join(map(str, sizes))
