"""Encoded images in explicit mode: the model that takes images is loaded and unloaded with its tensor model."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path

import numpy as np
import psutil
import pytest
from running import Server, StartServer
from test_lifecycle import zoo_load

from graphkiln_backend.graph.image_model import ACCEPT_IMAGES_LINE
from graphkiln_client import Client

pytestmark = [pytest.mark.server, pytest.mark.slow]


def is_ready(server: Server, model: str) -> bool:
    return server.status(f"/v2/models/{model}/ready") == 200


def test_image_model_is_loaded_and_unloaded_with_its_tensor_model(
    start_server: StartServer, digits: Path, repository: Path, tmp_path: Path
) -> None:
    store = tmp_path / "store"
    shutil.copytree(digits, store / "digits")
    with (store / "digits" / "config.pbtxt").open("a") as config:
        config.write(ACCEPT_IMAGES_LINE)
    image = next((repository / "docs" / "digits").glob("*.png")).read_bytes()
    server = start_server("--model-store", store, "--model-control-mode=explicit")
    server.wait_until(lambda: server.status("/v2/health/live") == 200)
    server.wait_until(lambda: "load 'digits'" in zoo_load(server, "digits.images")[1])
    assert zoo_load(server, "digits.images")[0] == 400

    assert zoo_load(server, "digits")[0] == 200
    server.wait_until(lambda: is_ready(server, "digits.images"))
    with Client(server.url) as client:
        model = client.model("digits")
        expected = model.classify(image, top_k=10).outputs["OUTPUT_0"]
        assert client.model("digits", images="encoded").classify(image, top_k=10).outputs["OUTPUT_0"] == expected
        scores = client.model("digits.images").infer({"IMAGE": np.array([[image]], dtype=object)})["OUTPUT_0"][0]
        assert [float(scores[each.index]) for each in expected] == [each.score for each in expected]

    server.wait_until(lambda: server.status("/v2/health/ready") == 200)  # the load that failed is forgotten
    triton = next(p for p in psutil.Process(server.process.pid).children() if p.name() == "tritonserver")
    triton.send_signal(signal.SIGKILL)
    server.wait_until(lambda: not triton.is_running() or triton.status() == psutil.STATUS_ZOMBIE)
    server.wait_until(lambda: is_ready(server, "digits") and is_ready(server, "digits.images"))

    zoo_load(server, "digits", "unload")
    server.wait_until(lambda: not is_ready(server, "digits.images"))

    zoo_load(server, "digits")
    server.wait_until(lambda: is_ready(server, "digits.images"))
    assert server.stop()[0] == 0
