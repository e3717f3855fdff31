"""The table of axis relations, against what runtimes compute: where it claims independence, changes do not arrive."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import onnx
import onnx_ir
import onnxruntime
import pytest
from graphs import draw, ints
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx.reference import ReferenceEvaluator

from graphkiln_backend.graph.axes import ELEMENTWISE, Node, Relation, relate, reshape_places
from graphkiln_backend.graph.dtypes import AnyArray
from graphkiln_backend.passes.node_axes import describe

RANDOM = np.random.default_rng(7)
IMAGE, FILTERS, CHANNELS = draw(3, 4, 6, 6), draw(8, 4, 3, 3), draw(4)
BYTES = RANDOM.integers(0, 255, (3, 4, 6, 6), np.uint8)
ROWS, PRODUCT = draw(3, 4), draw(4, 5)
POINT, SCALE = np.uint8(3), np.float32(0.5)
STATISTICS = {"s": CHANNELS, "b": CHANNELS, "m": CHANNELS, "v": np.abs(CHANNELS)}
TREE = """nodes_treeids=[0,0,0], nodes_nodeids=[0,1,2], nodes_featureids=[0,0,0], nodes_values=[0.5,0.0,0.0],
    nodes_modes=["BRANCH_LEQ","LEAF","LEAF"], nodes_truenodeids=[1,0,0], nodes_falsenodeids=[2,0,0]"""


@dataclass(frozen=True)
class Case:
    """A node whose inputs of lower case vary, and whose inputs of upper case are constants.

    `axes` is the relation in the notation of einsum, `.` for an axis without a label, `?` for an unknown tensor.
    """

    text: str
    axes: str
    tensors: dict[str, AnyArray]
    opset: int = 21

    @property
    def operator(self) -> str:
        """Type of the node."""
        return self.node.op_type

    @property
    def node(self) -> onnx.NodeProto:
        """The node."""
        return onnx.parser.parse_node(self.text)

    def model(self) -> onnx.ModelProto:
        """A graph of the node alone."""
        model = onnx.helper.make_model(
            onnx.helper.make_graph(
                [self.node],
                "g",
                [
                    onnx.helper.make_tensor_value_info(
                        name, onnx.helper.np_dtype_to_tensor_dtype(array.dtype), array.shape
                    )
                    for name, array in self.tensors.items()
                    if name.islower()
                ],
                [onnx.helper.make_empty_tensor_value_info(name) for name in self.node.output],
                [
                    onnx.numpy_helper.from_array(np.asarray(each), name)
                    for name, each in self.tensors.items()
                    if name.isupper()
                ],
            ),
            opset_imports=[onnx.helper.make_opsetid("", self.opset), onnx.helper.make_opsetid("ai.onnx.ml", 3)],
            ir_version=10,
        )
        return onnx.shape_inference.infer_shapes(model, data_prop=True)


def case(text: str, axes: str, *, opset: int = 21, **tensors: Any) -> Case:
    return Case(text, axes, {name: np.asarray(each) for name, each in tensors.items()}, opset)


CASES = [
    case("y = AveragePool<kernel_shape=[2,2]>(x)", "a...->a...", x=IMAGE),
    case("y = BatchNormalization(x, s, b, m, v)", "abcd,b,b,b,b->abcd", x=IMAGE, **STATISTICS),
    case("y, n, w = BatchNormalization<training_mode=1>(x, s, b, m, v)", "abcd,b,b,b,b->.b..", x=IMAGE, **STATISTICS),
    case("y = ai.onnx.ml.Binarizer(x)", "a.->a.", x=ROWS),
    case("y = Concat<axis=1>(x, z)", "a.,a.->a.", x=ROWS, z=draw(3, 2)),
    case("y = ConstantOfShape(S)", ".->ab", S=ints(3, 4)),
    case("y = Conv(x, w)", "a...->a...", x=IMAGE, w=FILTERS),
    case("y = ConvInteger(x, W)", "a...->a...", x=BYTES, W=np.ones((2, 4, 3, 3), np.uint8)),
    case("y = ConvTranspose(x, w)", "a...->a...", x=IMAGE, w=draw(4, 2, 3, 3)),
    case("y = CumSum(x, A)", "ab->.b", x=ROWS, A=np.int64(0)),
    case("y = DepthToSpace<blocksize=2>(x)", "a...->a...", x=IMAGE),
    case("y = DequantizeLinear<axis=1>(x, S, P)", "abcd,b,b->abcd", x=BYTES, S=np.abs(CHANNELS), P=np.ones(4,
         np.uint8)),
    case("y = DequantizeLinear<axis=1, block_size=2>(x, S)", "a.bc,a.bc->a.bc", x=BYTES, S=np.abs(draw(3, 2, 6, 6))),
    case("y, m = Dropout(x)", "ab->ab,ab", x=ROWS),
    case('y = Einsum<equation="bij,bjk->bik">(x, z)', "abc,acd->abd", x=draw(2, 3, 4), z=draw(2, 4, 5)),
    case("y = Expand(x, S)", "a.b->acb", x=draw(3, 1, 5), S=ints(3, 4, 1)),
    case("y = Flatten(x)", "a...->a.", x=IMAGE),
    case("y = Flatten<axis=-1>(x)", "..a->.a", x=draw(2, 3, 4)),
    case("y = Gather<axis=1>(x, i)", "a.bc,de->adebc", x=IMAGE, i=np.array([[0, 1, 2], [3, 2, 1]])),
    case("y = GatherElements<axis=1>(x, i)", "a.,ab->ab", x=ROWS, i=np.array([[0, 1], [3, 2], [1, 1]])),
    case("y = GatherND(x, i)", "..ab,c.->cab", x=IMAGE, i=np.array([[0, 1], [2, 0], [1, 1], [0, 2], [2, 2]])),
    case("y = GatherND<batch_dims=1>(x, i)", "a.bc,ad.->adbc", x=IMAGE, i=np.array([[[0], [1]], [[2], [3]], [[1],
         [1]]])),
    case("y = Gemm<transA=1>(x, w, b)", "ab,ac,c->bc", x=ROWS, w=draw(3, 5), b=draw(5)),
    case("y = Gemm<transB=1>(x, w, b)", "ab,cb,a.->ac", x=ROWS, w=draw(5, 4), b=draw(3, 1)),
    case("y = GlobalAveragePool(x)", "a...->a...", x=IMAGE),
    case("y = GlobalLpPool(x)", "a...->a...", x=IMAGE),
    case("y = GlobalMaxPool(x)", "a...->a...", x=IMAGE),
    case("y = GridSample(x, g)", "ab..,a...->ab..", x=IMAGE, g=draw(3, 2, 5, 2) / 4),
    case("y = GroupNormalization<num_groups=2>(x, s, b)", "a...->a...", x=IMAGE, s=CHANNELS, b=CHANNELS),
    case("y, h = GRU<hidden_size=2>(x, W, R, , , h0)", "ab.,?,?,?,b,.b.->..b.,.b.",
         x=draw(5, 3, 4), W=draw(1, 6, 4), R=draw(1, 6, 2), h0=draw(1, 3, 2)),
    case("y, h, c = LSTM<hidden_size=2>(x, W, R, , l)", "ab.,?,?,?,b->..b.,.b.,.b.",
         x=draw(5, 3, 4), W=draw(1, 8, 4), R=draw(1, 8, 2), l=np.array([5, 3, 4], np.int32)),
    case("y, h = RNN<hidden_size=2, layout=1>(x, W, R)", "ab.,?,?->a...,a..", x=draw(3, 5, 4), W=draw(1, 2, 4),
         R=draw(1, 2, 2)),
    case("y = Hardmax<axis=0>(x)", "ab->.b", x=ROWS),
    case("y = ai.onnx.ml.Imputer<imputed_value_floats=[1.0], replaced_value_float=0.0>(x)", "a.->a.", x=ROWS),
    case("y = InstanceNormalization(x, s, b)", "a...->a...", x=IMAGE, s=CHANNELS, b=CHANNELS),
    case("y = LRN<size=3>(x)", "a...->a...", x=IMAGE),
    case("y = LayerNormalization<axis=-2>(x, s)", "abc,bc->a..", x=draw(3, 4, 5), s=draw(4, 5)),
    case("y, p = ai.onnx.ml.LinearClassifier<coefficients=[1.0,2.0,1.0,3.0,4.0,1.0,1.0,2.0], intercepts=[0.1,0.2], "
         "classlabels_ints=[0,1]>(x)",
         "a.->a,a.", x=ROWS),
    case("y = ai.onnx.ml.LinearRegressor<coefficients=[1.0,2.0,3.0,4.0], targets=1>(x)", "a.->a.", x=ROWS),
    case("y = LogSoftmax(x)", "ab->a.", x=ROWS),
    case("y = LpNormalization<axis=0>(x)", "ab->.b", x=ROWS),
    case("y = LpPool<kernel_shape=[2,2]>(x)", "a...->a...", x=IMAGE),
    case("y = MatMul(x, z)", "a.bc,dce->adbe", x=draw(2, 1, 3, 4), z=draw(5, 4, 6)),
    case("y = MatMul(x, z)", "a,bac->bc", x=draw(4), z=draw(2, 4, 5)),
    case("y = MatMulInteger(x, w, P, C)", "ab,bc,,c->ac", x=BYTES[:, :, 0, 0], w=BYTES[0, :, :, 0], P=POINT,
         C=np.ones(6, np.uint8)),
    case("y, i = MaxPool<kernel_shape=[2,2]>(x)", "a...->a...,a...", x=IMAGE),
    case("y = MeanVarianceNormalization(x)", "abcd->.b..", x=IMAGE),
    case("y = OneHot<axis=1>(i, D, V)", "ab->a.b", i=np.array([[0, 1], [2, 3], [1, 1]]), D=np.int64(4), V=draw(2)),
    case("y = Pad(x, W, , A)", "ab.c->ab.c", x=IMAGE, W=ints(1, 2), A=ints(2)),
    case('y = Pad<mode="reflect">(x, W)', "abc.->abc.", x=IMAGE, W=ints(0, 0, 0, 1, 0, 0, 0, 1)),
    case("y = QLinearConv(x, S, P, W, S, P, S, P)", "a...->a...", x=BYTES, S=SCALE, P=POINT, W=np.ones((2, 4, 3, 3),
         np.uint8)),
    case("y = QLinearMatMul(x, S, P, w, S, P, S, P)", "ab,,,bc,,,,->ac", x=BYTES[:, :, 0, 0], w=BYTES[0, :, :, 0],
         S=SCALE, P=POINT),
    case("y = QuantizeLinear(x, S, P)", "abcd,,->abcd", x=IMAGE, S=SCALE, P=POINT),
    case("y = ReduceMean<keepdims=0>(x, A)", "abcd->bd", x=IMAGE, A=ints(0, -2)),
    case("y = ReduceSum(x)", "ab->..", x=ROWS),
    case("y = ReduceSum<noop_with_empty_axes=1>(x)", "ab->ab", x=ROWS),
    case("y = ReduceL2<axes=[0]>(x)", "ab->.b", x=ROWS, opset=13),
    *(case(f"y = {name}<axis=1>(x)", "ab->a.", x=ROWS) for name in ("ArgMax", "ArgMin")),
    *(case(f"y = Reduce{name}(x, A)", "ab->a.", x=np.abs(ROWS), A=ints(1)) for name in (
        "L1", "L2", "LogSum", "LogSumExp", "Max", "Min", "Prod", "SumSquare")),
    case("y = RMSNormalization(x, s)", "ab,b->a.", x=ROWS, s=CHANNELS, opset=23),
    case("y = Reshape(x, S)", "ab..->ab.", x=IMAGE, S=ints(0, 0, -1)),
    case("y = Resize(x, , S)", "ab..->ab..", x=IMAGE, S=np.array([1, 1, 2, 0.5], np.float32)),
    case('y = Resize<mode="cubic", axes=[3]>(x, , , S)', "abc.->abc.", x=IMAGE, S=ints(9)),
    case("y = ai.onnx.ml.Scaler<offset=[1.0], scale=[2.0]>(x)", "a.->a.", x=ROWS),
    case("y = Slice(x, B, E, A)", "a..b->a..b", x=IMAGE, B=ints(1, 2), E=ints(3, 4), A=ints(1, 2)),
    case("y = Slice(x, B, E)", "a.->a.", x=ROWS, B=ints(0, 1), E=ints(1 << 62, 3)),
    case("y = Slice<starts=[1], ends=[3], axes=[0]>(x)", ".a->.a", x=ROWS, opset=9),
    case("y = Softmax(x)", "abcd->abc.", x=IMAGE),
    case("y = Softmax(x)", "abcd->a...", x=IMAGE, opset=11),
    case("y = SpaceToDepth<blocksize=2>(x)", "a...->a...", x=IMAGE),
    case("y, z = Split<axis=1, num_outputs=2>(x)", "a.->a.,a.", x=ROWS),
    case("y = Squeeze(x, A)", "a.b->ab", x=draw(3, 1, 4), A=ints(-2)),
    case("y = Squeeze(x)", "a.b->ab", x=draw(3, 1, 4)),
    case("y = Tile(x, R)", "a.->a.", x=ROWS, R=ints(1, 2)),
    case("y, i = TopK(x, K)", "ab->a.,a.", x=ROWS, K=ints(2)),
    case("y = Transpose<perm=[2,0,1]>(x)", "abc->cab", x=draw(2, 3, 4)),
    case("y = Transpose(x)", "abc->cba", x=draw(2, 3, 4)),
    case(f"y = ai.onnx.ml.TreeEnsembleRegressor<{TREE}, n_targets=1, target_ids=[0,0], target_nodeids=[1,2], "
         "target_treeids=[0,0], target_weights=[1.0,2.0]>(x)", "a.->a.", x=ROWS),
    case(f"y, p = ai.onnx.ml.TreeEnsembleClassifier<{TREE}, class_treeids=[0,0], class_nodeids=[1,2], class_ids=[0,1], "
         "class_weights=[1.0,1.0], classlabels_int64s=[0,1]>(x)", "a.->a,a.", x=ROWS),
    case("y = Trilu(x)", "a..->a..", x=draw(2, 4, 4)),
    case("y = Unsqueeze(x, A)", "ab->a.b.", x=ROWS, A=ints(1, 3)),
    case("y = Add(x, z)", "abc,b.->abc", x=draw(2, 3, 4), z=draw(3, 1)),
    case("y = Clip(x, , M)", "ab,,->ab", x=ROWS, M=np.float32(0.5)),
    case("y = Where(c, x, z)", "a.,ab,b->ab", c=np.array([[True], [False], [True]]), x=ROWS, z=CHANNELS),
]  # fmt: skip


def spell(node: onnx.NodeProto, relation: Relation | None) -> str:
    """A relation in the notation of einsum, its labels renamed in order."""
    if relation is None:
        return "?"
    names = dict[int, str]()

    def axes(found: Any) -> str:
        if found is None:
            return "?"
        return "".join("." if label is None else names.setdefault(label, "abcdefghij"[len(names)]) for label in found)

    sides = ((node.input, relation.inputs), (node.output, relation.outputs))
    inputs, outputs = (",".join(axes(each) for _, each in zip(*side, strict=False)) for side in sides)
    return f"{inputs}->{outputs}"


def run(model: onnx.ModelProto, feeds: dict[str, AnyArray]) -> list[AnyArray]:
    try:
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4
        session = onnxruntime.InferenceSession(model.SerializeToString(), options)
    except Exception:  # what the runtime does not implement, the reference does
        return list(ReferenceEvaluator(model).run(None, feeds))
    return list(session.run(None, feeds))


def redrawn(array: AnyArray) -> AnyArray:
    """Other values of the same range: indices stay valid."""
    found: AnyArray = RANDOM.permutation(array.ravel()).reshape(array.shape)
    return found + RANDOM.standard_normal(array.shape).astype(array.dtype) if array.dtype.kind == "f" else found


def check_independent(case: Case, relation: Relation) -> int:
    """Change all that a label runs through but one index: the outputs at this index stay."""
    model, checked = case.model(), 0
    feeds = {name: array for name, array in case.tensors.items() if name.islower()}
    before = run(model, feeds)
    for label in {label for axes in relation.outputs for label in axes or ()} - {None} - set(relation.mixed):
        changed = dict(feeds)
        for name, axes in zip(case.node.input, relation.inputs, strict=False):
            if name in feeds and axes and label in axes:
                other, axis = redrawn(feeds[name]), axes.index(label)
                keep = np.arange(feeds[name].shape[axis]) == 1
                shape = [-1 if at == axis else 1 for at in range(other.ndim)]
                changed[name] = np.where(keep.reshape(shape), feeds[name], other)
        for axes, old, new in zip(relation.outputs, before, run(model, changed), strict=False):
            if axes and label in axes:
                assert len(axes) == np.ndim(old)
                np.testing.assert_array_equal(*(np.take(each, 1, axes.index(label)) for each in (old, new)))
                checked += 1
    return checked


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.text[:60])
def test_claims_of_independence_hold(case: Case) -> None:
    (node,) = onnx_ir.from_proto(case.model()).graph
    described = describe(node)
    relation = relate(described)
    assert spell(case.node, relation) == case.axes
    assert relation is not None
    check_independent(case, relation)
    # The analysis of rows knows ranks, not sizes.
    inputs = [shape and tuple(1 if size == 1 else None for size in shape) for shape in described.inputs]
    ranks = relate(replace(described, inputs=inputs, outputs=[None] * len(described.outputs)))
    if ranks:
        check_independent(case, ranks)


UNARY = sorted(ELEMENTWISE - {"Where", "Clip", "Add"})


@pytest.mark.parametrize("operator", UNARY)
def test_elementwise_operators(operator: str) -> None:
    """With as many inputs as they need, each broadcast in another way."""
    schema = onnx.defs.get_schema(operator)
    count = max(schema.min_input, min(2, schema.max_input))
    attributes = {"Cast": "<to=7>", "BitShift": '<direction="LEFT">', "Mod": "<fmod=1>"}.get(operator, "")
    allowed = schema.inputs[0].types
    dtype = next(kind for name, kind in _DTYPES.items() if f"tensor({name})" in allowed)
    shapes = [(3, 4), (1, 4)][:count]
    tensors = {
        name: np.abs(draw(*shape, seed=at) * 3).astype(dtype)
        for at, (name, shape) in enumerate(zip("xz", shapes, strict=False))
    }
    spelled = "ab->ab" if count == 1 else "ab,.b->ab"
    each = Case(
        f"y = {operator}{attributes}({', '.join(tensors)})", spelled, tensors, opset=onnx.defs.onnx_opset_version()
    )
    (node,) = onnx_ir.from_proto(each.model()).graph
    relation = relate(describe(node))
    assert spell(each.node, relation) == spelled
    assert relation is not None
    assert check_independent(each, relation)


_DTYPES = {"float": np.float32, "bool": np.bool_, "uint8": np.uint8}


@pytest.mark.parametrize("node", [
    Node(operator="Softmax", opset=18, attributes={"axis": "x"}, inputs=[(2, 2)], outputs=[None],
         read_constant=lambda _: None),
    Node(operator="MatMul", opset=18, attributes={}, inputs=[], outputs=[None], read_constant=lambda _: None),
    Node(operator="Softmax", opset=18, attributes={}, inputs=[None], outputs=[None], read_constant=lambda _: None),
    Node(operator="Squeeze", opset=18, attributes={}, inputs=[(1, 2), (1,)], outputs=[None],
         read_constant=lambda _: None),
    Node(operator="NonZero", opset=18, attributes={}, inputs=[(1, 2)], outputs=[None], read_constant=lambda _: None),
])  # fmt: skip
def test_unknown_relations(node: Node) -> None:
    assert relate(node) is None


@settings(max_examples=200, deadline=None)
@given(st.integers(2, 4), st.lists(st.integers(1, 4), max_size=3), st.lists(st.integers(1, 4), max_size=3), st.data())
def test_factor_after_a_reshape(extent: int, ahead: list[int], behind: list[int], data: st.DataObject) -> None:
    """Numbers of the factor in all elements: the same before and after."""
    factors = [*ahead, extent, *behind]

    def merged() -> list[list[int]]:
        ends = sorted({*data.draw(st.lists(st.integers(1, len(factors)), max_size=3)), len(factors)})
        return [list(range(start, end)) for start, end in zip([0, *ends], ends, strict=False)]

    source, target = merged(), merged()
    numbers: AnyArray = np.broadcast_to(np.arange(extent).reshape(-1, *[1] * len(behind)), factors)

    def place(axes: list[list[int]]) -> tuple[int, int]:
        at, axis = next((at, axis) for at, axis in enumerate(axes) if len(ahead) in axis)
        return at, math.prod(factors[each] for each in axis if each > len(ahead))

    shapes = [tuple(math.prod(factors[each] for each in axis) for axis in axes) for axes in (source, target)]
    assert reshape_places(*shapes, *place(source), extent) == [place(target)]
    axis, inner = place(target)
    index = np.arange(shapes[1][axis]) // inner % extent
    found = np.moveaxis(numbers.reshape(shapes[1]), axis, -1)
    np.testing.assert_array_equal(found, np.broadcast_to(index, found.shape))


def test_factor_split_by_a_reshape() -> None:
    assert reshape_places((4, 3), (2, 6), 0, 1, 4) == []
    assert reshape_places((1, 6), (1, 6), 0, 1, 1) == [(1, 6), (0, 1)], "a batch of 1 is on both"
    assert reshape_places(("b", 8, 3), ("b", 24), 1, 4, 2) == [(1, 12)]
    assert reshape_places(("b", 8, 3), ("c", 3), 1, 4, 2) == [(0, 4)]
    assert reshape_places(("b", 8, "c"), ("b", 8, "c"), 1, 4, 2) == []


def test_negative_control() -> None:
    false = Relation([(0, 1)], [(0, 1)])
    for text in ("y = Softmax(x)", "y = LpNormalization(x)"):
        with pytest.raises(AssertionError):
            check_independent(case(text, "", x=ROWS), false)
