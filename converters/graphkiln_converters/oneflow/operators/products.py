"""Matrix products."""

from __future__ import annotations

from graphkiln_converters.oneflow.building import Op, Value
from graphkiln_converters.oneflow.translator import translates


@translates("matmul", "batch_matmul", "broadcast_matmul")
def matmul(op: Op) -> Value:
    """`alpha * a @ b (+ addend)`; a or b may be transposed first."""
    a = _transpose(op, 0) if op.flag("transpose_a", False) else op.inputs[0]
    b = _transpose(op, 1) if op.flag("transpose_b", False) else op.inputs[1]
    y = op.emit("MatMul", a, b)
    alpha = op.number("alpha", 1.0)
    if alpha != 1.0:
        y = op.emit("Mul", y, op.scalar(alpha))
    return op.emit("Add", y, op.inputs[2]) if len(op.inputs) > 2 else y


def _transpose(op: Op, index: int) -> Value:
    rank = len(op.shape_of(index))
    return op.emit("Transpose", op.inputs[index], perm=[*range(rank - 2), rank - 1, rank - 2])
