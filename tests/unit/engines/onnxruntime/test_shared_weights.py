"""Weights on disk for all instances: made once, mapped by all, and the same answers."""

from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from graphkiln_backend.engines.base import SessionConfig
from graphkiln_backend.engines.onnxruntime import OnnxRuntimeEngine
from graphkiln_backend.engines.onnxruntime.loading import WEIGHTS, SharedWeights
from graphkiln_backend.graph.device import CPU

ALONE = SessionConfig(engine="onnxruntime", device=CPU, threads=1, spin=False, reason="test")


@pytest.fixture
def graph(digits: Path, tmp_path: Path) -> Path:
    return shutil.copytree(digits / "1", tmp_path / "version") / "model.onnx"


@pytest.fixture
def shared(tmp_path: Path) -> SessionConfig:
    (tmp_path / "shared").mkdir()
    return dataclasses.replace(ALONE, shared_folder=tmp_path / "shared")


def test_the_answers_are_the_same_to_the_bit(graph: Path, shared: SessionConfig) -> None:
    feeds = {"INPUT_0": np.random.default_rng(0).normal(size=(3, 1, 32, 32)).astype(np.float32)}
    with OnnxRuntimeEngine().build(graph, ALONE) as alone, OnnxRuntimeEngine().build(graph, shared) as sharing:
        np.testing.assert_array_equal(alone.run(feeds)["OUTPUT_0"], sharing.run(feeds)["OUTPUT_0"])
        assert alone.signature == sharing.signature
        maps = Path("/proc/self/maps").read_text()
    assert WEIGHTS in maps, "the weights are not mapped from the shared file"
    assert not list((shared.shared_folder or graph).glob("*/")), "the copy was not removed"


def test_many_at_once_make_one_copy(graph: Path, tmp_path: Path) -> None:
    made: list[Path] = []

    def save(path: Path) -> None:
        made.append(path)
        path.write_bytes(b"graph")

    with ThreadPoolExecutor(8) as pool:
        copies = list(pool.map(lambda _: SharedWeights(tmp_path, graph, "", save), range(16)))
    assert len(made) == 1
    assert {copy.path.read_bytes() for copy in copies} == {b"graph"}
    for copy in copies:
        copy.close()
    assert not list(tmp_path.glob("*/graph.onnx"))


def test_a_changed_graph_or_option_makes_a_new_copy(graph: Path, tmp_path: Path) -> None:
    def save(path: Path) -> None:
        path.write_bytes(b"")

    def path(options: str) -> Path:
        copy = stack.enter_context(SharedWeights(tmp_path, graph, options, save))
        return copy.path

    with ExitStack() as stack:
        first = path("a")
        assert path("a") == first
        assert path("b") != first
        os.utime(graph.parent / "golden.npz", ns=(1, 1))
        assert path("a") != first


def test_where_the_copy_cannot_be_written_each_instance_has_its_own(
    graph: Path, tmp_path: Path, logged: list[str]
) -> None:
    config = dataclasses.replace(ALONE, shared_folder=tmp_path / "missing")
    with OnnxRuntimeEngine().build(graph, ALONE) as alone, OnnxRuntimeEngine().build(graph, config) as session:
        assert session.signature == alone.signature
    assert logged[0].startswith(f"the instances of {graph} do not share its weights")


def test_a_process_that_dies_holds_nothing(graph: Path, tmp_path: Path) -> None:
    """Its lock ends with it: the next one that closes the copy removes it."""
    program = (
        "import os, pathlib, sys\n"
        "from graphkiln_backend.engines.onnxruntime.loading import SharedWeights\n"
        "folder, graph = map(pathlib.Path, sys.argv[1:])\n"
        "SharedWeights(folder, graph, '', lambda path: path.write_bytes(b'graph'))\n"
        "os._exit(1)\n"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path), str(graph)], check=False)
    assert list(tmp_path.glob("*/graph.onnx")), "what a dead process wrote is there for the next one"
    with SharedWeights(tmp_path, graph, "", lambda _: pytest.fail("was there already")):
        pass
    assert not list(tmp_path.glob("*/graph.onnx"))


def test_a_copy_in_use_by_another_process_stays(graph: Path, tmp_path: Path) -> None:
    program = (
        "import pathlib, sys\n"
        "from graphkiln_backend.engines.onnxruntime.loading import SharedWeights\n"
        "folder, graph = map(pathlib.Path, sys.argv[1:])\n"
        "with SharedWeights(folder, graph, '', lambda path: path.write_bytes(b'graph')):\n"
        "    print('open', flush=True)\n"
        "    sys.stdin.read()\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path), str(graph)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        assert process.stdout.readline() == "open\n"
        shared = SharedWeights(tmp_path, graph, "", lambda _: pytest.fail("was there already"))
        shared.close()
        assert shared.path.exists()
        process.communicate("")
    assert not shared.path.exists()
