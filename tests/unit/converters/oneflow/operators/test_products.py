"""Matrix products beside NumPy's."""

from __future__ import annotations

import numpy as np
import pytest
from translating import check_operator, run_operator

from graphkiln_backend.graph.errors import ConversionError

GENERATOR = np.random.default_rng(0)
A, B = (GENERATOR.standard_normal((2, 4, 4)).astype("f4") for _ in range(2))


@pytest.mark.parametrize("transpose_a", [True, False])
@pytest.mark.parametrize("transpose_b", [True, False])
@pytest.mark.parametrize("kind", ["batch_matmul", "broadcast_matmul"])
def test_either_side_may_be_transposed(kind: str, transpose_a: bool, transpose_b: bool) -> None:
    a, b = A.swapaxes(1, 2) if transpose_a else A, B.swapaxes(1, 2) if transpose_b else B
    check_operator(kind, [A, B], a @ b, transpose_a=transpose_a, transpose_b=transpose_b)


def test_of_matrices_that_are_not_square() -> None:
    a, b = A[0, :3], B[0, :2]
    check_operator("matmul", [a, b], a @ b.T, transpose_b=True)


def test_a_batch_and_one_matrix() -> None:
    check_operator("broadcast_matmul", [A, B[0]], A @ B[0])


@pytest.mark.parametrize("alpha", [1.0, 0.125, -2.0])
def test_a_factor(alpha: float) -> None:
    check_operator("matmul", [A[0], B[0]], np.float32(alpha) * (A[0] @ B[0]), alpha=alpha)


def test_an_addend_is_not_scaled() -> None:
    check_operator("matmul", [A[0], B[0], A[1]], 0.5 * (A[0] @ B[0]) + A[1], alpha=0.5)


def test_sizes_that_do_not_fit() -> None:
    with pytest.raises(ConversionError, match="do not fit each other: MatMul"):
        run_operator("matmul", [A[0], B[0, :3]], [A[0]])
