"""Split graphs on a real engine, compared with the whole graph on the same engine."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir
import pytest
import split_graphs
from graphs import compute, draw, ints
from graphs import graph as make_graph
from lowered import ORT
from split_graphs import spread

from graphkiln_backend.engines.base import Session
from graphkiln_backend.engines.onnxruntime import OnnxRuntimeEngine
from graphkiln_backend.graph.device import CPU, Parallelism, Place
from graphkiln_backend.graph.errors import GraphkilnError
from graphkiln_backend.lowering.parallel import building
from graphkiln_backend.lowering.parallel.building import build_split
from graphkiln_backend.lowering.parallel.parts import PreparedParts, count_costs, graph_of, write_parts
from graphkiln_backend.lowering.parallel.stages import find_cuts
from graphkiln_backend.repository.onnx_file import read_signature

CORE = split_graphs.CORE
GRAPHS: dict[str, tuple[Callable[[], onnx_ir.Model], tuple[int, ...]]] = {
    "convolutions": (split_graphs.convolutions, (3, 16, 16)),
    "mlp": (split_graphs.mlp, (24,)),
    "quantized": (split_graphs.quantized, (24,)),
    "attention": (split_graphs.attention, (5, 24)),
    "fused": (split_graphs.fused, (5, 24)),
}


@contextmanager
def built(make: Callable[[], onnx_ir.Model], folder: Path, *numbers: int) -> Iterator[tuple[Session, Session]]:
    """The whole graph and the split one."""
    graph = split_graphs.save(make(), folder / "whole")
    config = spread(graph, folder / "parts", *numbers)
    engine = OnnxRuntimeEngine()
    with (
        engine.build(graph, ORT) as whole,
        build_split(engine, PreparedParts(folder=folder / "parts"), config, read_signature(graph)) as split,
    ):
        yield whole, split


@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.parametrize("pipeline", [2, 3])
def test_pipeline_equals_the_whole_graph_bit_by_bit(tmp_path: Path, name: str, pipeline: int) -> None:
    make, shape = GRAPHS[name]
    with built(make, tmp_path, pipeline) as (whole, split):
        for rows in (1, 4):
            x = draw(rows, *shape, seed=rows)
            alone = [whole.run({"x": x[row : row + 1]})["y"] for row in range(rows)]  # as micro-batches are: of one row
            np.testing.assert_array_equal(split.run({"x": x})["y"], np.concatenate(alone))
        assert split.signature.inputs == whole.signature.inputs
        assert [spec.name for spec in split.signature.outputs] == ["y"]


@pytest.mark.parametrize(
    ("name", "numbers"),
    [
        *(("mlp", (1, 2)), ("mlp", (1, 4)), ("quantized", (1, 2)), ("fused", (1, 2))),
        *(("attention", (1, 4)), ("attention", (2, 2))),
    ],
)
def test_shards_equal_the_whole_graph_up_to_rounding(tmp_path: Path, name: str, numbers: tuple[int, int]) -> None:
    make, shape = GRAPHS[name]
    with built(make, tmp_path, *numbers) as (whole, split):
        x = draw(4, *shape, seed=1)
        found, expected = split.run({"x": x})["y"], whole.run({"x": x})["y"]
        assert np.linalg.norm(found - expected) <= 1e-6 * np.linalg.norm(expected)
        np.testing.assert_array_equal(split.run({"x": x})["y"], found)


def test_stages_run_in_threads_on_their_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, set[int]] = {}
    original = OnnxRuntimeEngine.build

    def build(self: OnnxRuntimeEngine, *arguments: Any) -> Any:
        seen[threading.current_thread().name] = os.sched_getaffinity(0)
        return original(self, *arguments)

    graph = split_graphs.save(split_graphs.convolutions(), tmp_path / "whole")
    config = spread(graph, tmp_path / "parts", 2)
    monkeypatch.setattr(OnnxRuntimeEngine, "build", build)
    with build_split(OnnxRuntimeEngine(), PreparedParts(folder=tmp_path / "parts"), config, read_signature(graph)):
        assert seen == {"graphkiln-stage-0_0": {CORE}, "graphkiln-stage-1_0": {CORE}}


@pytest.mark.parametrize("numbers", [(2, 1), (1, 2)])
def test_failed_build_leaves_nothing_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, numbers: tuple[int, int]
) -> None:
    graph = split_graphs.save(split_graphs.mlp(), tmp_path / "whole")
    config = spread(graph, tmp_path / "parts", *numbers)
    graph_of(tmp_path / "parts", 1, numbers[1] - 1).write_bytes(b"damaged")
    workers: list[Any] = []

    class Kept(building.Worker):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            workers.append(self)

    monkeypatch.setattr(building, "Worker", Kept)
    before = threading.active_count()
    with pytest.raises(GraphkilnError, match="cannot load"):
        build_split(OnnxRuntimeEngine(), PreparedParts(folder=tmp_path / "parts"), config, read_signature(graph))
    assert workers
    assert threading.active_count() == before
    for worker in workers:
        with pytest.raises(RuntimeError, match="after shutdown"):
            worker.submit(print)


def test_instances_share_the_weights_of_each_part(tmp_path: Path) -> None:
    graph = split_graphs.save(split_graphs.convolutions(), tmp_path / "whole")
    (tmp_path / "shared").mkdir()
    config = replace(spread(graph, tmp_path / "parts", 2), shared_folder=tmp_path / "shared")
    engine, signature, x = OnnxRuntimeEngine(), read_signature(graph), draw(4, 3, 16, 16, seed=1)
    with (
        engine.build(graph, ORT) as whole,
        build_split(engine, PreparedParts(folder=tmp_path / "parts"), config, signature) as first,
        build_split(engine, PreparedParts(folder=tmp_path / "parts"), config, signature) as second,
    ):
        assert len(list((tmp_path / "shared").glob("*/"))) == 2, "a copy for each part"
        expected = np.concatenate([whole.run({"x": x[row : row + 1]})["y"] for row in range(4)])
        for split in (first, second):
            np.testing.assert_array_equal(split.run({"x": x})["y"], expected)
    assert not list((tmp_path / "shared").glob("*/"))


LOOPED = """(float[b,4] x, float[b,4] late) => (float[b,4] y, float[b,4] early) {
    early = Neg(x)
    t = Exp(early)
    z = Loop (rounds, yes, x) <body = l (int64 i, bool c, float[b,4] a) => (bool d, float[b,4] s) {
        d = Identity(c)
        u = Mul(a, w)
        s = Add(u, t)
    }>
    k = Add(z, early)
    y = Sub(k, late)
}"""
SCANNED = """(float[b,4] x) => (float[b,4] y, float[4] total) {
    t = Exp(x)
    r = ReduceMax<keepdims=0>(t)
    total, sums = Scan <num_scan_inputs=1, body = l (float[4] a, float[4] row) => (float[4] n, float[4] o) {
        u = Div(row, r)
        n = Add(a, u)
        o = Add(a, u)
    }> (start, t)
    y = Mul(sums, t)
}"""
TYPES = """(float[b,4] x) => (float[b,4] y, int64[b] best) {
    best = ArgMax<axis=1, keepdims=0>(x)
    positive = Greater(x, zero)
    one = Unsqueeze(best, axis)
    chosen = GatherElements<axis=1>(x, one)
    y0 = Where(positive, chosen, x)
    y = Cast<to=1>(y0)
}"""
TEXTS = """(string[b] s) => (string[b,1] y, string[b] early) {
    early = StringConcat(s, mark)
    more = StringConcat(early, mark)
    y = Unsqueeze(more, axis)
}"""
UNUSUAL: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "a loop that reads from another stage": (
        LOOPED,
        {"w": draw(4), "rounds": np.int64(3), "yes": np.bool_(True)},
        {"x": draw(3, 4), "late": draw(3, 4, seed=1)},
    ),
    "a scan, and a number of the whole batch": (SCANNED, {"start": np.zeros(4, np.float32)}, {"x": draw(3, 4)}),
    "positions and truth values": (TYPES, {"zero": np.float32(0), "axis": ints(1)}, {"x": draw(3, 4)}),
    "texts": (TEXTS, {"mark": np.array(["é"], object), "axis": ints(1)}, {"s": np.array(["a", "", "ß"], object)}),
}


@pytest.mark.parametrize("name", UNUSUAL)
def test_unusual_tensors_between_stages(tmp_path: Path, name: str) -> None:
    """Every cut, compared with ONNX's reference."""
    text, weights, feeds = UNUSUAL[name]
    graph = split_graphs.save(made := make_graph(text, opset=20, **weights), tmp_path / "whole")
    expected = compute(made, **feeds)
    costs = count_costs(graph, 1)
    places = [place for place in find_cuts(costs) if 0 < place < len(costs.nodes)]
    assert len(places) >= 2
    for place in places:
        (folder := tmp_path / f"parts{place}").mkdir()
        write_parts(graph, (place,), 1, folder)
        numbers = Parallelism(pipeline=2, micro_batches=1)
        config = replace(ORT, parallel=numbers, places=(Place(CPU, (CORE,)),) * 2, cuts=(place,))
        with build_split(OnnxRuntimeEngine(), PreparedParts(folder=folder), config, read_signature(graph)) as split:
            found = split.run(feeds)
        for key, array in expected.items():
            if array.dtype.kind == "f":
                np.testing.assert_allclose(found[key], array, rtol=1e-5)
            else:
                np.testing.assert_array_equal(found[key], array)


@pytest.mark.parametrize("numbers", [(2, 1), (1, 2)])
def test_dynamic_sizes(tmp_path: Path, numbers: tuple[int, int]) -> None:
    with built(split_graphs.decoder, tmp_path, *numbers) as (_, split):
        for rows, tokens in ((1, 3), (4, 9), (0, 5), (2, 1), (4, 9)):
            x = draw(rows, tokens, 24, seed=tokens)
            found, expected = split.run({"x": x})["y"], compute(split_graphs.decoder(), x=x)["y"]
            assert found.shape == (rows, tokens, 24)
            np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


HALVES = """(float16[batch,24] x) => (float16[batch,24] y) {
    h = MatMul(x, w1)
    g = Relu(h)
    e = MatMul(g, w2)
    y = Add(e, x)
}"""


@pytest.mark.parametrize("numbers", [(2, 1), (1, 2)])
def test_graphs_in_fp16(tmp_path: Path, numbers: tuple[int, int]) -> None:
    """Compared with the same graph in fp32 within the policy's row."""
    weights = {"w1": draw(24, 48) / 7, "w2": draw(48, 24, seed=1) / 10}
    halves = {name: array.astype(np.float16) for name, array in weights.items()}
    x = draw(4, 24, seed=2)
    expected = compute(make_graph(HALVES.replace("float16", "float"), **weights), x=x)["y"]
    with built(lambda: make_graph(HALVES, **halves), tmp_path, *numbers) as (_, split):
        found = split.run({"x": x.astype(np.float16)})["y"]
    assert found.dtype == np.float16
    assert np.linalg.norm(found - expected) <= 1e-2 * np.linalg.norm(expected)
