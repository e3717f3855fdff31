"""An ONNX file is read once, however many ask for what it says."""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import zoo
from onnx import helper

from graphkiln_backend.graph.errors import RepositoryError
from graphkiln_backend.repository import onnx_reading
from graphkiln_backend.repository.onnx_reading import graph_sha256, read_graph, read_whole_graph

WEIGHTS = np.ones((256, 256), np.float32)


@pytest.fixture
def graph(tmp_path: Path) -> Path:
    nodes = [helper.make_node("MatMul", ["x", "w"], ["m"]), helper.make_node("Reshape", ["m", "shape"], ["y"])]
    weights = {"w": WEIGHTS, "shape": np.array([-1, 256], np.int64)}
    proto = zoo.model(nodes, [zoo.value("x", ("n", 256))], [zoo.value("y", ("n", 256))], weights)
    path = tmp_path / "model.onnx"
    path.write_bytes(proto.SerializeToString())
    return path


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each file is read."""
    counts: Counter[str] = Counter()
    plain = onnx_reading.read_bytes

    def counting(path: Path, limit: int) -> bytes:
        counts[path.name] += 1
        return plain(path, limit)

    monkeypatch.setattr(onnx_reading, "read_bytes", counting)
    return counts


def test_it_is_read_once(graph: Path, read: Counter[str]) -> None:
    assert graph_sha256(graph) == hashlib.sha256(graph.read_bytes()).hexdigest()
    assert [node.op_type for _ in range(3) for node in read_graph(graph).graph.node] == ["MatMul", "Reshape"] * 3
    assert read == {"model.onnx": 1}


def test_weights_are_not_kept_and_shapes_are(graph: Path) -> None:
    weights, shape = read_graph(graph).graph.initializer
    assert (weights.dims, weights.raw_data) == ([256, 256], b"")
    assert onnx.numpy_helper.to_array(shape).tolist() == [-1, 256]
    whole = read_whole_graph(graph).graph.initializer[0]
    assert np.array_equal(onnx.numpy_helper.to_array(whole), WEIGHTS)


def test_what_is_changed_is_the_callers_own(graph: Path) -> None:
    del read_graph(graph).graph.node[:]
    assert len(read_graph(graph).graph.node) == 2


@pytest.mark.parametrize("how", ["in place", "another file of the same time"])
def test_a_file_that_was_replaced_is_read_again(graph: Path, read: Counter[str], how: str) -> None:
    before, status = read_graph(graph), graph.stat()
    before.doc_string = "other"
    target = graph if how == "in place" else graph.with_name("new.onnx")
    target.write_bytes(before.SerializeToString())
    os.utime(target, ns=(status.st_atime_ns, status.st_mtime_ns))
    target.rename(graph)
    assert read_graph(graph).doc_string == "other"
    assert read["model.onnx"] == 2


@pytest.mark.parametrize("content", [b"no graph", None])
def test_damage_is_told_each_time(tmp_path: Path, content: Any) -> None:
    path = tmp_path / "damaged.onnx"
    if content:
        path.write_bytes(content)
    for read in (read_graph, graph_sha256, read_whole_graph):
        with pytest.raises(RepositoryError, match="is not an ONNX graph"):
            read(path)
