"""Graphs whose products can be cut: a residual convolution net, an MLP, and attention in its two usual forms."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir
from graphs import compute, draw, graph, ints
from lowered import ORT

from graphkiln_backend.engines.base import SessionConfig
from graphkiln_backend.graph.device import CPU, Parallelism, Place
from graphkiln_backend.graph.dtypes import AnyArray
from graphkiln_backend.lowering.parallel.parts import count_costs, write_parts
from graphkiln_backend.lowering.parallel.speed import CPU_CORE
from graphkiln_backend.lowering.parallel.stages import find_stages
from graphkiln_backend.passes.sharding import Sharded, shard_graph
from graphkiln_backend.passes.stages import find_parts, write_part

CORE = min(os.sched_getaffinity(0))
HEADS, DEPTH, WIDTH, TOKENS = 4, 6, 24, 5
# Width of a product whose weights take longer to read than a tensor takes to be passed on.
WIDE = 512

CONVOLUTIONS = """(float[batch,3,16,16] x) => (float[batch,10] y) {
    a0 = Conv<pads=[1,1,1,1]>(x, k0, c0)
    a1 = Relu(a0)
    b0 = Conv<pads=[1,1,1,1]>(a1, k1, c1)
    b1 = Relu(b0)
    b2 = Conv<pads=[1,1,1,1]>(b1, k2, c1)
    b3 = Add(b2, a1)
    b4 = Relu(b3)
    d0 = Conv<pads=[1,1,1,1], strides=[2,2]>(b4, k3, c1)
    d1 = Relu(d0)
    p = GlobalAveragePool(d1)
    f = Flatten(p)
    y = Gemm<transB=1>(f, w, v)
}"""

MLP = """(float[batch,24] x) => (float[batch,24] y) {
    n = LayerNormalization<axis=-1>(x, s, o)
    h = Gemm(n, w1, b1)
    g = Relu(h)
    m = Mul(g, gate)
    e = Gemm<transB=1>(m, w2, b2)
    y = Add(e, x)
}"""

ATTENTION = """(float[batch,5,24] x) => (float[batch,5,24] y) {
    q0 = MatMul(x, wq)
    q1 = Add(q0, bq)
    q2 = Reshape(q1, split)
    q = Transpose<perm=[0,2,1,3]>(q2)
    k0 = MatMul(x, wk)
    k1 = Add(k0, bk)
    k2 = Reshape(k1, split)
    k = Transpose<perm=[0,2,3,1]>(k2)
    v0 = MatMul(x, wv)
    v2 = Reshape(v0, split)
    v = Transpose<perm=[0,2,1,3]>(v2)
    s0 = MatMul(q, k)
    s1 = Mul(s0, scale)
    s2 = Add(s1, mask)
    s = Softmax<axis=-1>(s2)
    c0 = MatMul(s, v)
    c1 = Transpose<perm=[0,2,1,3]>(c0)
    c = Reshape(c1, joined)
    o0 = MatMul(c, wo)
    o = Add(o0, bo)
    r = Add(o, x)
    h0 = MatMul(r, w1)
    h1 = Add(h0, b1)
    h = Gelu(h1)
    e0 = MatMul(h, w2)
    e = Add(e0, b2)
    y = Add(e, r)
}"""

FUSED = """(float[batch,5,24] x) => (float[batch,5,24] y) {
    a0 = MatMul(x, wqkv)
    a1 = Add(a0, bqkv)
    a2 = Reshape(a1, five)
    a3 = Transpose<perm=[2,0,3,1,4]>(a2)
    q = Gather<axis=0>(a3, zero)
    k0 = Gather<axis=0>(a3, one)
    k = Transpose<perm=[0,1,3,2]>(k0)
    v = Gather<axis=0>(a3, two)
    s0 = MatMul(q, k)
    s = Softmax<axis=-1>(s0)
    c0 = MatMul(s, v)
    c1 = Transpose<perm=[0,2,1,3]>(c0)
    c = Reshape(c1, joined)
    o0 = MatMul(c, wo)
    o = Add(o0, bo)
    y = Add(o, x)
}"""

LOOKING_UP = """(float[batch,512] x, int64[batch,1] row) => (float[batch,512] y) {
    a = MatMul(x, w0)
    b = MatMul(a, w1)
    c = MatMul(b, w2)
    p = Gather<axis=0>(table, row)
    q = Squeeze(p, one)
    d = Add(c, q)
    e = MatMul(d, w3)
    y = MatMul(e, w4)
}"""

DECODER = """(float[batch,tokens,24] x) => (float[batch,tokens,24] y) {
    sizes = Shape<start=0, end=2>(x)
    rows = Reshape(x, flat)
    p0 = Gemm(rows, wqkv, bqkv)
    wide = Concat<axis=0>(sizes, three)
    p = Reshape(p0, wide)
    q0, k0, v0 = Split<axis=2>(p, each)
    q1 = Reshape(q0, split)
    q = Transpose<perm=[0,2,1,3]>(q1)
    k1 = Reshape(k0, split)
    k = Transpose<perm=[0,2,3,1]>(k1)
    v1 = Reshape(v0, split)
    v = Transpose<perm=[0,2,1,3]>(v1)
    s0 = MatMul(q, k)
    s = Softmax<axis=-1>(s0)
    c0 = MatMul(s, v)
    c1 = Transpose<perm=[0,2,1,3]>(c0)
    c = Reshape(c1, joined)
    c2 = Reshape(c, flat)
    o0 = Gemm(c2, wo, bo)
    narrow = Concat<axis=0>(sizes, one)
    o = Reshape(o0, narrow)
    y = Add(o, x)
}"""

RELATIVE = """(float[batch,tokens,24] x) => (float[batch,tokens,24] y) {
    q0 = MatMul(x, wq)
    q1 = Reshape(q0, split)
    q = Transpose<perm=[0,2,1,3]>(q1)
    k0 = MatMul(x, wk)
    k1 = Reshape(k0, split)
    k = Transpose<perm=[0,2,3,1]>(k1)
    v0 = MatMul(x, wv)
    v1 = Reshape(v0, split)
    v = Transpose<perm=[0,2,1,3]>(v1)
    s0 = MatMul(q, k)
    tokens = Shape<start=1, end=2>(x)
    last = Squeeze(tokens)
    n = Range(origin, last, step)
    down = Unsqueeze(n, second)
    right = Unsqueeze(n, first)
    apart0 = Sub(down, right)
    apart1 = Abs(apart0)
    apart = Min(apart1, most)
    e0 = Gather(table, apart)
    e1 = Transpose<perm=[2,0,1]>(e0)
    e = Unsqueeze(e1, first)
    s1 = Add(s0, e)
    every = Concat<axis=0>(single, heads, tokens, tokens)
    z = ConstantOfShape(every)
    s2 = Add(s1, z)
    l = Expand(little, every)
    s3 = Add(s2, l)
    s = Softmax<axis=-1>(s3)
    c0 = MatMul(s, v)
    c1 = Transpose<perm=[0,2,1,3]>(c0)
    c = Reshape(c1, joined)
    o = MatMul(c, wo)
    y = Add(o, x)
}"""


QUANTIZED = """(float[batch,24] x) => (float[batch,24] y) {
    w1 = DequantizeLinear<axis=1>(q1, s1, z1)
    w2 = DequantizeLinear<axis=0>(q2, s2, z2)
    b = DequantizeLinear<axis=0>(qb, sb)
    x0 = QuantizeLinear(x, sx, zx)
    x1 = DequantizeLinear(x0, sx, zx)
    h = MatMul(x1, w1)
    g = Relu(h)
    g0 = QuantizeLinear(g, sg, zg)
    g1 = DequantizeLinear(g0, sg, zg)
    e = Gemm<transB=1>(g1, w2, b)
    y = Add(e, x)
}"""


def _small(*shape: int, seed: int) -> AnyArray:
    return draw(*shape, seed=seed) * (0.5 / shape[0] ** 0.5)


def convolutions() -> onnx_ir.Model:
    """A net with a residual branch."""
    weights = {"k0": (16, 3, 3, 3), "k1": (16, 16, 3, 3), "k2": (16, 16, 3, 3), "k3": (16, 16, 3, 3)}
    drawn: dict[str, Any] = {name: draw(*shape, seed=seed) * 0.1 for seed, (name, shape) in enumerate(weights.items())}
    return graph(CONVOLUTIONS, **drawn, c0=draw(16), c1=draw(16, seed=9), w=draw(10, 16, seed=7), v=draw(10, seed=8))


def mlp() -> onnx_ir.Model:
    """Two products with an activation and a gate between them, and biases."""
    return graph(
        MLP,
        s=draw(24), o=draw(24, seed=1), w1=_small(24, 48, seed=2), b1=draw(48, seed=3), gate=draw(1, 48, seed=4),
        w2=_small(24, 48, seed=5), b2=draw(24, seed=6),
    )  # fmt: skip


def quantized() -> onnx_ir.Model:
    """The same in int8, as quantizers write it: weights first, with a scale per column."""
    random = np.random.default_rng(7)
    rows = random.uniform(1, 4, 24).astype(np.float32) / 1000
    return graph(
        QUANTIZED,
        opset=21,
        q1=random.integers(-127, 128, (24, 48), dtype=np.int8), s1=random.uniform(1, 4, 48).astype(np.float32) / 1000,
        z1=np.zeros(48, np.int8), q2=random.integers(-127, 128, (24, 48), dtype=np.int8),
        s2=rows, z2=np.zeros(24, np.int8),
        qb=random.integers(-9000, 9000, 24, dtype=np.int32), sb=rows * np.float32(0.03),
        sx=np.float32(0.04), zx=np.uint8(128), sg=np.float32(0.03), zg=np.uint8(0),
    )  # fmt: skip


def attention() -> onnx_ir.Model:
    """A block of a transformer: attention of 4 heads, then two products."""
    squares = {name: _small(WIDTH, WIDTH, seed=seed) for seed, name in enumerate(("wq", "wk", "wv", "wo"))}
    rows = {name: draw(WIDTH, seed=10 + seed) for seed, name in enumerate(("bq", "bk", "bo", "b2"))}
    return graph(
        ATTENTION, opset=20, **squares, **rows, split=ints(0, 0, HEADS, DEPTH), joined=ints(0, 0, WIDTH),
        scale=draw(1, seed=20) * 0 + 0.4, mask=draw(1, 1, TOKENS, TOKENS, seed=21),
        w1=_small(WIDTH, 4 * WIDTH, seed=22),
        b1=draw(4 * WIDTH, seed=23), w2=_small(4 * WIDTH, WIDTH, seed=24),
    )  # fmt: skip


def fused() -> onnx_ir.Model:
    """Attention whose queries, keys and values are columns of one weight."""
    return graph(
        FUSED, opset=20, wqkv=_small(WIDTH, 3 * WIDTH, seed=1), bqkv=draw(3 * WIDTH, seed=2),
        five=ints(0, TOKENS, 3, HEADS, DEPTH), zero=ints(0).reshape(()), one=ints(1).reshape(()),
        two=ints(2).reshape(()), joined=ints(-1, TOKENS, WIDTH), wo=_small(WIDTH, WIDTH, seed=3),
        bo=draw(WIDTH, seed=4),
    )  # fmt: skip


def looking_up(rows: int) -> onnx_ir.Model:
    """Five products; before the fourth, a row of a table is added, which fails for a missing row."""
    weights = {f"w{number}": draw(WIDE, WIDE, seed=number) / WIDE**0.5 for number in range(5)}
    return graph(LOOKING_UP, **weights, table=draw(rows, WIDE, seed=9), one=ints(1))


def decoder() -> onnx_ir.Model:
    """Attention of GPT-2: one product of all rows for queries, keys and values, with computed shapes."""
    return graph(
        DECODER, opset=20, wqkv=_small(WIDTH, 3 * WIDTH, seed=1), bqkv=draw(3 * WIDTH, seed=2), flat=ints(-1, WIDTH),
        three=ints(3 * WIDTH), one=ints(WIDTH), each=ints(WIDTH, WIDTH, WIDTH), split=ints(0, 0, HEADS, DEPTH),
        joined=ints(0, 0, WIDTH), wo=_small(WIDTH, WIDTH, seed=3), bo=draw(WIDTH, seed=4),
    )  # fmt: skip


def relative() -> onnx_ir.Model:
    """Attention of T5: a bias from a table for each head and distance, in computed shapes."""
    squares = {name: _small(WIDTH, WIDTH, seed=seed) for seed, name in enumerate(("wq", "wk", "wv", "wo"))}
    return graph(
        RELATIVE, opset=20, **squares, split=ints(0, 0, HEADS, DEPTH), joined=ints(0, 0, WIDTH),
        origin=ints(0).reshape(()), step=ints(1).reshape(()), first=ints(0), second=ints(1), most=ints(3),
        table=draw(4, HEADS, seed=9), single=ints(1), heads=ints(HEADS), little=draw(1, 1, 1, seed=10),
    )  # fmt: skip


def save(model: onnx_ir.Model, folder: Path) -> Path:
    """Write a graph into a folder, which is created."""
    folder.mkdir(parents=True, exist_ok=True)
    onnx_ir.save(model, folder / "model.onnx")
    return folder / "model.onnx"


def spread(graph: Path, folder: Path, pipeline: int, tensor: int = 1, micro_batches: int = 4) -> SessionConfig:
    """Configuration of a split graph on one core; its parts are written into a folder."""
    cuts = tuple(stage.begin for stage in find_stages(count_costs(graph, tensor), pipeline, CPU_CORE)[1:])
    folder.mkdir(exist_ok=True)
    write_parts(graph, cuts, tensor, folder)
    numbers = Parallelism(pipeline=pipeline, tensor=tensor, micro_batches=micro_batches if pipeline > 1 else 0)
    return replace(ORT, parallel=numbers, places=(Place(CPU, (CORE,)),) * (pipeline * tensor), cuts=cuts)


def cut(make: Callable[[], onnx_ir.Model], folder: Path, shards: int) -> list[Sharded]:
    """All shards of a graph."""
    path = save(make(), folder)
    return [shard_graph(path, shards, shard) for shard in range(shards)]


def together(shards: list[Sharded], folder: Path, **feeds: AnyArray) -> dict[str, AnyArray]:
    """Outputs of the shards, part by part, by ONNX's reference implementation; sums in fp64."""
    tensors = [dict(feeds) for _ in shards]
    listed = [find_parts(each.model, ()) for each in shards]
    for number, part in enumerate(listed[0]):
        for own, each, parts in zip(tensors, shards, listed, strict=True):
            target = folder / "part.onnx"
            write_part(each.model, parts[number], target)
            own.update(compute(onnx_ir.load(target), **{name: own[name] for name in parts[number].inputs}))
        for name, total in part.reduced.items():
            summed = np.sum([own[name].astype(np.float64) for own in tensors], axis=0).astype(np.float32)
            for own in tensors:
                own[total] = summed
    return tensors[0]
