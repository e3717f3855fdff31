"""Sizes of inputs, given or usual."""

from __future__ import annotations

import pytest

from graphkiln_backend.graph.errors import ConversionError
from graphkiln_converters.sources.sizes import sizes_of


@pytest.mark.parametrize(
    ("dims", "given", "sizes"),
    [
        (("b", 3, "h"), {}, (8, 3, 8)),
        ((None, 3, None), {}, (8, 3, 8)),
        (("b", 3, "h"), {"x": (3, 5)}, (8, 3, 5)),
        ((2, 3, "h"), {"": (3, 5)}, (2, 3, 5)),
        (("t", 3, "h"), {"x": (7, 3, 5)}, (7, 3, 5)),
        (("b", 3), {"y": (5,)}, (8, 3)),
        (("b",), {}, (8,)),
        ((), {}, ()),
    ],
)
def test_of_a_sample_or_of_all_dimensions(
    dims: tuple[object, ...], given: dict[str, tuple[int, ...]], sizes: tuple[int, ...]
) -> None:
    assert sizes_of("x", dims, given) == sizes


@pytest.mark.parametrize("given", [(3,), (1, 2, 3, 4)])
def test_too_many_or_too_few(given: tuple[int, ...]) -> None:
    with pytest.raises(ConversionError, match=r"does not fit input 'x' \[b, 3, h\] \(.*: x=3x8\)"):
        sizes_of("x", ("b", 3, "h"), {"": given})
