"""Random graphs whose answers a runtime may take from memory that is not theirs, and a caller who notices.

Small integers, which every precision represents exactly, pass through operators that a runtime may drop, compute in
place, or answer with a view. Each answer is kept and compared again after all later requests.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import onnx
import zoo
from onnx import helper, numpy_helper

from graphkiln_backend.graph.dtypes import AnyArray, DType

Feeds: TypeAlias = Mapping[str, AnyArray]
Run: TypeAlias = Callable[[Feeds, Sequence[str] | None], Mapping[str, AnyArray]]  # computes some or all outputs

_GUARD = 64  # bytes before and after each input
_CANARY = 0xA5
_TAILS = ((4,), (1, 4), (2, 1), (2, 2))
_TYPES = (DType.FP32, DType.FP16, DType.BF16, DType.INT32, DType.INT64, DType.UINT8)
_COMPUTED = (DType.FP32, DType.INT32)  # types with arithmetic in every runtime


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor of a random graph, and how to compute it."""

    name: str
    dtype: DType
    tail: tuple[int, ...]  # dimensions after the batch
    compute: Callable[[Feeds], AnyArray]
    batched: bool = True

    def shape(self, rows: Any) -> list[Any]:
        """Its dimensions."""
        return [rows, *self.tail] if self.batched else [*self.tail]

    def info(self) -> onnx.ValueInfoProto:
        """Its description as an input or output."""
        return zoo.value(self.name, self.shape("n"), zoo.DTYPES[self.dtype])


class RandomGraph:
    """A graph of operators that move data, drawn from a seed.

    With `constants`, it may have scalars, and outputs that are constants. With `computed`, all values are FP32, and no
    output is an input.

    Attributes:
        inputs: Its inputs.
        outputs: Its outputs: computed tensors, inputs and constants.
    """

    def __init__(self, seed: int, *, constants: bool = True, computed: bool = False) -> None:
        self._types = (DType.FP32,) if computed else _TYPES
        self._rng = np.random.default_rng(seed)
        self._nodes: list[onnx.NodeProto] = []
        self._constants: dict[str, AnyArray] = {"yes": np.array(True)}
        self._count = 0
        self.inputs = [self._input(number) for number in range(self._rng.integers(1, 4))]
        values = [self._relu(each) for each in self.inputs] if computed else [*self.inputs]
        for _ in range(self._rng.integers(2, 8)):
            values.append(self._operator(values[self._rng.integers(len(values))]))
        chosen = self._rng.permutation(len(values))[: self._rng.integers(1, len(values) + 1)]
        self.outputs = [values[index] for index in chosen]
        if self._rng.random() < 0.4 and constants:
            self.outputs.append(self._constant_output())
            self.inputs.append(replace(self._input(len(self.inputs)), tail=(), batched=False))
            self.outputs += [self.inputs[-1], self._same(self.inputs[-1])]
        if self._rng.random() < 0.4:  # the same value twice
            self.outputs.append(self._node("Identity", self.outputs[0]))

    def model(self) -> onnx.ModelProto:
        """Make the ONNX graph."""
        inputs, outputs = [each.info() for each in self.inputs], [each.info() for each in self.outputs]
        tensors = [numpy_helper.from_array(array, name) for name, array in self._constants.items()]
        graph = helper.make_graph(self._nodes, "random", inputs, outputs, tensors)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)

    def _name(self, prefix: str) -> str:
        self._count += 1
        return f"{prefix}{self._count}"

    def _input(self, number: int) -> Value:
        name = f"x{number}"
        tail = _TAILS[self._rng.integers(len(_TAILS))]
        return Value(name, self._types[self._rng.integers(len(self._types))], tail, lambda feeds: feeds[name])

    def _constant(self, array: Any) -> str:
        name = self._name("k")
        self._constants[name] = np.asarray(array)
        return name

    def _node(
        self,
        kind: str,
        source: Value,
        *more: str,
        change: Callable[[AnyArray], AnyArray] = lambda array: array,
        tail: Sequence[int] | None = None,
        first: str = "",
        others: Sequence[str] = (),
        **attributes: Any,
    ) -> Value:
        name = self._name("v")
        inputs = [*filter(None, [first]), source.name, *more]
        self._nodes.append(helper.make_node(kind, inputs, [name, *others], name=name, **attributes))
        return Value(
            name,
            source.dtype,
            source.tail if tail is None else tuple(tail),
            lambda feeds: change(source.compute(feeds)),
            source.batched,
        )

    def _constant_output(self) -> Value:
        array = np.arange(3, dtype=np.float32)
        name = self._name("c")
        if self._rng.random() < 0.5:
            self._constants[name] = array
        else:
            self._nodes.append(helper.make_node("Identity", [self._constant(array)], [name]))
        return Value(name, DType.FP32, (3,), lambda _: array, batched=False)

    def _operator(self, source: Value) -> Value:
        moves = [self._same, self._reshape, self._unsqueeze, self._squeeze, self._transpose, self._concat]
        if source.dtype not in (DType.INT32, DType.INT64):  # OpenVINO refuses those that may be too large
            moves.append(self._branch)
        if source.dtype in _COMPUTED:
            moves += [self._add, self._relu, self._slice, self._split, self._where]
        return moves[self._rng.integers(len(moves))](source)

    def _same(self, source: Value) -> Value:
        if self._rng.random() < 0.5:
            return self._node("Cast", source, to=zoo.DTYPES[source.dtype])
        return self._node("Identity", source)

    def _reshape(self, source: Value) -> Value:
        size = int(np.prod(source.tail))
        tail = [(size,), (1, size), source.tail][self._rng.integers(3)]
        return self._node(
            "Reshape",
            source,
            self._constant(np.array([0, *tail])),
            change=lambda array: array.reshape(len(array), *tail),
            tail=tail,
        )

    def _unsqueeze(self, source: Value) -> Value:
        change = lambda array: array[:, np.newaxis]  # noqa: E731
        return self._node("Unsqueeze", source, self._constant([1]), change=change, tail=(1, *source.tail))

    def _squeeze(self, source: Value) -> Value:
        axes = [axis for axis, size in enumerate(source.tail) if size == 1]
        if not axes or len(source.tail) == 1:
            return self._same(source)
        tail = source.tail[: axes[0]] + source.tail[axes[0] + 1 :]
        change = lambda array: array.squeeze(axes[0] + 1)  # noqa: E731
        return self._node("Squeeze", source, self._constant([axes[0] + 1]), change=change, tail=tail)

    def _transpose(self, source: Value) -> Value:
        order = 1 + self._rng.permutation(len(source.tail))
        axes = [0, *map(int, order)]
        tail = [source.tail[axis - 1] for axis in axes[1:]]
        return self._node("Transpose", source, change=lambda array: array.transpose(axes), tail=tail, perm=axes)

    def _concat(self, source: Value) -> Value:
        times = int(self._rng.integers(1, 3))
        return self._node(
            "Concat",
            source,
            *[source.name] * (times - 1),
            change=lambda array: np.concatenate([array] * times, 1),
            tail=(times * source.tail[0], *source.tail[1:]),
            axis=1,
        )

    def _branch(self, source: Value) -> Value:
        kind = zoo.DTYPES[source.dtype]
        branches = [
            helper.make_graph(
                [helper.make_node("Identity", [source.name], [name])],
                name,
                [],
                [helper.make_tensor_value_info(name, kind, None)],
            )
            for name in (self._name("b"), self._name("b"))
        ]
        value = self._node("If", source, then_branch=branches[0], else_branch=branches[1])
        self._nodes[-1].input[:] = ["yes"]
        return value

    def _add(self, source: Value) -> Value:
        if self._rng.random() < 0.5:
            return self._node("Add", source, source.name, change=lambda array: array + array)
        return self._node("Add", source, self._constant(np.zeros(1, source.dtype.numpy)))

    def _relu(self, source: Value) -> Value:
        return self._node("Relu", source)

    def _slice(self, source: Value) -> Value:
        end = [2**31 - 1, max(1, source.tail[0] // 2), 0][self._rng.choice(3, p=[0.6, 0.3, 0.1])]
        bounds = [self._constant([each]) for each in (0, end, 1)]
        tail = (len(range(source.tail[0])[:end]), *source.tail[1:])
        return self._node("Slice", source, *bounds, change=lambda array: array[:, :end], tail=tail)

    def _split(self, source: Value) -> Value:
        half = source.tail[0] // 2
        if not half:
            return self._same(source)
        sizes = self._constant([half, source.tail[0] - half])
        rest = self._name("v")
        tail = (half, *source.tail[1:])
        change = lambda array: array[:, :half]  # noqa: E731
        return self._node("Split", source, sizes, change=change, tail=tail, others=[rest], axis=1)

    def _where(self, source: Value) -> Value:
        return self._node("Where", source, source.name, first="yes")


class Caller:
    """Sends requests in arrays between canaries, overwrites them afterwards, and keeps the answers."""

    def __init__(self, graph: RandomGraph, seed: int) -> None:
        self._graph = graph
        self._rng = np.random.default_rng(seed)
        self._kept: list[tuple[AnyArray, AnyArray, str]] = []

    def call(self, run: Run, rows: int) -> None:
        """Send a request, and compare its answer."""
        memory: dict[str, AnyArray] = {}
        feeds: dict[str, AnyArray] = {}
        for each in self._graph.inputs:
            array = self._rng.integers(0, 255, each.shape(rows)).astype(each.dtype.numpy)
            memory[each.name] = np.full(2 * _GUARD + array.nbytes, _CANARY, np.uint8)
            feeds[each.name] = memory[each.name][_GUARD : _GUARD + array.nbytes].view(array.dtype).reshape(array.shape)
            feeds[each.name][...] = array
        before = {name: array.copy() for name, array in memory.items()}
        expected = {each.name: np.array(each.compute(feeds)) for each in self._graph.outputs}
        names = [each.name for each in self._graph.outputs if self._rng.random() < 0.8] or None
        answer = run(feeds, names)
        assert list(answer) == (names or [*expected])
        for name, array in memory.items():
            np.testing.assert_array_equal(array, before[name], err_msg=f"input {name} was written to")
            array[:] = 0xFF
        for name, array in answer.items():
            assert array.dtype == expected[name].dtype
            np.testing.assert_array_equal(array, expected[name], err_msg=name)
            if array.flags.writeable and self._rng.random() < 0.3:
                array[...] = 1  # belongs to the caller
            else:
                self._kept.append((array, expected[name], name))

    def check(self) -> None:
        """Compare all answers again."""
        for array, expected, name in self._kept:
            np.testing.assert_array_equal(array, expected, err_msg=f"a kept answer changed: {name}")
