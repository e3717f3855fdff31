"""Versions with different labels and preprocessing: converted concurrently, served side by side, replaced."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import zoo
from onnx import helper, save
from PIL import Image
from running import COMMAND, Server, StartServer, run_command

from graphkiln_backend.repository.version import read_version
from graphkiln_client import AsyncClient, Client

pytestmark = [pytest.mark.server, pytest.mark.slow]

ENGLISH = ("red", "green", "blue")
GERMAN = ("rot", "grün", "blau")
RED = np.full((4, 4, 3), (255, 0, 0), np.uint8)
# The class of a red image: the version with German labels takes BGR.
EXPECTED = {("red", "green", "blue"): ("red", 0), ("rot", "grün", "blau"): ("blau", 2)}


@pytest.fixture
def graph(tmp_path: Path) -> Path:
    """Graph that computes the mean of each channel."""
    nodes = [helper.make_node("ReduceMean", ["x", "axes"], ["y"], keepdims=0)]
    inputs, outputs = [zoo.value("x", ("batch", 3, 4, 4))], [zoo.value("y", ("batch", 3))]
    save(zoo.model(nodes, inputs, outputs, {"axes": np.array([2, 3], np.int64)}), tmp_path / "mean.onnx")
    return tmp_path / "mean.onnx"


@pytest.fixture
def conversion(graph: Path, tmp_path: Path) -> Callable[[tuple[str, ...]], list[str]]:
    """Command that converts the graph with labels and the preprocessing that belongs to them."""

    def conversion(labels: tuple[str, ...]) -> list[str]:
        file = tmp_path / f"{labels[0]}.txt"
        file.write_text("\n".join(labels) + "\n")
        spec = json.dumps({"resize": [4, 4], "color": "RGB" if labels == ENGLISH else "BGR"})
        options = ["--name", "mean", "--model-store", tmp_path / "store", "--labels", file, "--preprocess", spec]
        return [*COMMAND, "convert", str(graph), *map(str, options)]

    return conversion


def convert(command: list[str]) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=120)


def answers_of_every_client(server: Server, version: str, image: Path) -> set[tuple[str, str, int]]:
    """Version, label and index of the best class, from both clients and the command over both protocols."""

    async def ask(url: str) -> tuple[str, str, int]:
        async with AsyncClient(url) as client:
            result = await client.model("mean", version).classify(RED)
            return result.version, result.top.label, result.top.index

    answers = set()
    for url in (server.url, server.grpc_url):
        answers.add(asyncio.run(ask(url)))
        with Client(url) as client:
            result = client.model("mean", version).classify(RED)
            answers.add((result.version, result.top.label, result.top.index))
        options = ["--version", version] if version else []
        command = run_command("classify", image, "--model", "mean", "--url", url, "--json", *options)
        (row,) = json.loads(command.stdout)
        answers.add((row["version"], row["classifications"][0]["label"], row["classifications"][0]["index"]))
    return answers


def test_concurrent_conversions_are_complete_versions(
    conversion: Callable[[tuple[str, ...]], list[str]], start_server: StartServer, tmp_path: Path
) -> None:
    running = [subprocess.Popen(conversion(labels)) for labels in (ENGLISH, GERMAN)]
    assert [process.wait(120) for process in running] == [0, 0]
    model = tmp_path / "store" / "mean"
    labels = {number: read_version(model / number).contract.labels for number in ("1", "2")}
    assert set(labels.values()) == {ENGLISH, GERMAN}
    for number in labels:
        assert run_command("verify", model / number).returncode == 0
    with (model / "config.pbtxt").open("a") as config:
        config.write("version_policy { all {} }\n")
    Image.fromarray(RED).save(tmp_path / "red.png")

    server = start_server("--model-store", tmp_path / "store")
    server.wait_ready()

    for version in ("1", "2", ""):
        answering = version or "2"
        expected = (answering, *EXPECTED[labels[answering]])
        assert answers_of_every_client(server, version, tmp_path / "red.png") == {expected}


def test_new_version_while_a_client_is_open(
    conversion: Callable[[tuple[str, ...]], list[str]], start_server: StartServer, tmp_path: Path
) -> None:
    convert(conversion(ENGLISH))
    model = tmp_path / "store" / "mean"
    options = ("--model-control-mode=poll", "--repository-poll-secs=1")
    server = start_server("--model-store", tmp_path / "store", *options)
    server.wait_ready()
    with Client(server.url) as client:
        served = client.model("mean")
        assert served.classify(RED).top.label == "red"

        shutil.copytree(model / "1", model / "2")  # and somebody swaps two of its labels
        (model / "2" / "labels.txt").write_text("green\nred\nblue\n")
        convert([*conversion(GERMAN), "--version", "3"])

        deadline = time.monotonic() + 60
        while (result := served.classify(RED)).version == "1":
            assert result.top.label == "red"
            assert time.monotonic() < deadline, server.log
            time.sleep(0.1)
        assert (result.version, result.top.label, result.top.index) == ("3", "blau", 2)
        assert {row.version for row in client.models() if row.ready} == {"3"}
