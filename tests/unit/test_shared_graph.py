"""Weights on disk for all instances: made once, mapped by all, and the same answers."""

from __future__ import annotations

import dataclasses
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from graphkiln.engines.base import Step
from graphkiln.engines.onnxruntime import OnnxRuntimeEngine
from graphkiln.engines.shared_graph import WEIGHTS, shared_graph
from graphkiln.graph.errors import LoweringError

ALONE = Step(engine="onnxruntime", device="cpu", threads=1, spin=False, reason="test")


@pytest.fixture
def graph(digits: Path, tmp_path: Path) -> Path:
    return shutil.copytree(digits / "1", tmp_path / "version") / "model.onnx"


@pytest.fixture
def shared(tmp_path: Path) -> Step:
    (tmp_path / "shared").mkdir()
    return dataclasses.replace(ALONE, shared_folder=tmp_path / "shared")


def test_the_answers_are_the_same_to_the_bit(graph: Path, shared: Step) -> None:
    feeds = {"INPUT_0": np.random.default_rng(0).normal(size=(3, 1, 32, 32)).astype(np.float32)}
    with OnnxRuntimeEngine().build(graph, ALONE) as alone, OnnxRuntimeEngine().build(graph, shared) as sharing:
        np.testing.assert_array_equal(alone.run(feeds)["OUTPUT_0"], sharing.run(feeds)["OUTPUT_0"])
        assert alone.signature == sharing.signature
        maps = Path("/proc/self/maps").read_text()
    assert WEIGHTS in maps, "the weights are not mapped from the shared file"


def test_many_at_once_make_one_copy(graph: Path, tmp_path: Path) -> None:
    made: list[Path] = []

    def save(path: Path) -> None:
        made.append(path)
        path.write_bytes(b"graph")

    with ThreadPoolExecutor(8) as pool:
        paths = set(pool.map(lambda _: shared_graph(tmp_path, graph, "", save), range(16)))
    assert len(made) == 1
    assert [path.read_bytes() for path in paths] == [b"graph"]


def test_a_changed_graph_or_option_makes_a_new_copy(graph: Path, tmp_path: Path) -> None:
    def save(path: Path) -> None:
        path.write_bytes(b"")

    first = shared_graph(tmp_path, graph, "a", save)
    assert shared_graph(tmp_path, graph, "a", save) == first
    assert shared_graph(tmp_path, graph, "b", save) != first
    os.utime(graph.parent / "golden.npz", ns=(1, 1))
    assert shared_graph(tmp_path, graph, "a", save) != first


def test_a_copy_that_was_left_half_done_is_made_again(graph: Path, tmp_path: Path) -> None:
    def fail(path: Path) -> None:
        path.write_bytes(b"half")
        raise OSError("no space left on device")

    with pytest.raises(OSError, match="no space"):
        shared_graph(tmp_path, graph, "", fail)
    assert shared_graph(tmp_path, graph, "", lambda path: path.write_bytes(b"whole") and None).read_bytes() == b"whole"


def test_a_folder_that_cannot_be_written_is_a_clear_error(graph: Path, tmp_path: Path) -> None:
    step = dataclasses.replace(ALONE, shared_folder=tmp_path / "missing")
    with pytest.raises(LoweringError, match="make room in the temporary folder"):
        OnnxRuntimeEngine().build(graph, step)
