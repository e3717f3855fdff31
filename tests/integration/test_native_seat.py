"""Graphs that Triton's C++ onnxruntime backend computes: the same answers, proven, and refused if they are wrong."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import psutil
import pytest
from onnx import numpy_helper
from running import Server, StartServer, is_stub

from graphkiln_backend.graph.manifest import MANIFEST_FILE, Manifest, sha256_of
from graphkiln_client import Client

pytestmark = pytest.mark.server

POLL = ("--model-control-mode=poll", "--repository-poll-secs=1")
SEVEN = "docs/digits/seven.png"


@pytest.fixture
def store(digits: Path, tmp_path: Path) -> Path:
    shutil.copytree(digits, tmp_path / "store" / "digits")
    return tmp_path / "store"


def answer(server: Server, model: str = "digits") -> tuple[str, float]:
    with Client(server.url) as client:
        top = client.model(model).classify(SEVEN).top
        return str(top.label), float(top.score)


def versions(server: Server, model: str = "digits") -> list[int]:
    return [number for number in range(1, 9) if server.status(f"/v2/models/{model}/versions/{number}/ready") == 200]


def instances(server: Server) -> list[psutil.Process]:
    return [child for child in psutil.Process(server.process.pid).children(recursive=True) if is_stub(child)]


def write(folder: Path, change: Callable[[onnx.ModelProto], None], *, seal: bool = True) -> None:
    """Change the graph of a version, and its hash in the manifest, as a tool with a fault would."""
    proto = onnx.load(folder / "model.onnx")
    change(proto)
    (folder / "model.onnx").write_bytes(proto.SerializeToString())
    if seal:
        manifest = Manifest.read(folder / MANIFEST_FILE)
        replace(manifest, sha256=sha256_of(folder / "model.onnx")).write(folder / MANIFEST_FILE)


def map_weights(function: Callable[[np.ndarray], np.ndarray]) -> Callable[[onnx.ModelProto], None]:
    def change(proto: onnx.ModelProto) -> None:
        for tensor in proto.graph.initializer:
            array = numpy_helper.to_array(tensor)
            if array.dtype == np.float32:
                tensor.CopyFrom(numpy_helper.from_array(function(array).astype(np.float32), tensor.name))

    return change


def cut(folder: Path) -> None:
    content = (folder / "model.onnx").read_bytes()
    (folder / "model.onnx").write_bytes(content[: len(content) // 2])


FAULTS: dict[str, Callable[[Path], None]] = {
    "wrong": lambda folder: write(folder, map_weights(lambda array: array * 1.01)),
    "bf16": lambda folder: write(folder, map_weights(lambda array: array.astype(ml_dtypes.bfloat16))),
    "nan": lambda folder: write(folder, map_weights(lambda array: array * np.nan)),
    "unsealed": lambda folder: write(folder, map_weights(lambda array: array * 1.01), seal=False),
    "cut": cut,
}


def publish(store: Path, number: int, change: Callable[[Path], None] = lambda _: None, model: str = "digits") -> None:
    """Add a version; all of its files appear at once."""
    folder = store.with_name("new") / str(number)
    shutil.copytree(store / model / "1", folder)
    change(folder)
    folder.rename(store / model / str(number))


def test_only_right_graphs_answer(start_server: StartServer, store: Path, cpp_backends: Path) -> None:
    """At the start, in poll mode and after the end of the server; the labels and the preprocessing as before."""
    publish(store, 2, FAULTS["wrong"])
    server = start_server("--model-store", store, "--backend-directory", cpp_backends, *POLL)
    server.wait_until(lambda: "serving HTTP" in server.log)
    assert "onnxruntime in C++, proven" in " ".join(server.log.replace("\u2502", " ").split())
    assert re.search("digits version 2 is not served: .*the outputs changed", server.log)
    assert instances(server) == []
    label, score = answer(server)
    assert label == "seven"
    for number, fault in enumerate(FAULTS, 3):
        publish(store, number, FAULTS[fault])
        refusal = f"digits version {number} is not served"
        server.wait_until(lambda refusal=refusal: refusal in server.log, timeout_s=60)
        assert versions(server) == [1]
        assert answer(server) == (label, score)
    publish(store, 8)
    server.wait_until(lambda: versions(server) == [8], timeout_s=60)
    for child in psutil.Process(server.process.pid).children():
        if child.name() == "tritonserver":
            child.kill()
    server.wait_until(lambda: server.log.count("serving HTTP") == 2)
    assert answer(server)[0] == label
    assert versions(server) == [8]


def test_both_seats_give_the_same_answers(start_server: StartServer, store: Path, cpp_backends: Path) -> None:
    config = (store / "digits" / "config.pbtxt").read_text()
    shutil.copytree(store / "digits", store / "ours")
    (store / "ours" / "config.pbtxt").write_text(config.replace('"digits"', '"ours"'))
    arguments = ("--model-store", store, "--backend-directory", cpp_backends)
    server = start_server(*arguments, "--set", "ours.seat=python", "--set", "digits.seat=native")
    server.wait_ready()
    assert len(instances(server)) == 1
    native, ours = answer(server), answer(server, "ours")
    assert native[0] == ours[0]
    assert native[1] == pytest.approx(ours[1], rel=1e-4)
    with Client(server.url) as client:
        configs = [client.model(name).config for name in ("digits", "ours")]
    assert [config["backend"] for config in configs] == ["onnxruntime", "graphkiln"]
    for key in ("preprocess", "contracts"):
        assert configs[0]["parameters"][key] == configs[1]["parameters"][key]
