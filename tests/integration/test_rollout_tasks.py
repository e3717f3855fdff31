"""Rollouts of a detector, a segmenter and an embedder on a real server: each is compared by its own decision."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnx
import pytest
from light_boxes import IMAGES, TASKS, light_box, write_store, write_version
from onnx import numpy_helper
from running import Server, StartServer

import graphkiln
from graphkiln_backend.server.rollouts import Progress, RolloutError
from graphkiln_client import Client

pytestmark = [pytest.mark.server, pytest.mark.wide]

ACCEPTS = 'parameters { key: "accept_images" value { string_value: "true" } }\n'
ASK = {"detector": "detect_many", "segmenter": "segment_many", "embedder": "embed_many"}

# Light pixels are 1 and others 0, so that a limit of 0.7 decides as 0.4 does, and with 2 nothing is light.
EQUAL, DARK = ("limit", 0.7), ("limit", 2.0)
OTHER = {"detector": DARK, "segmenter": DARK, "embedder": ("gain", [1, 0, 0])}


def with_constant(name: str, value: Any) -> onnx.ModelProto:
    """The graph with another constant."""
    graph = light_box()
    (constant,) = [each for each in graph.graph.initializer if each.name == name]
    constant.CopyFrom(numpy_helper.from_array(np.asarray(value, numpy_helper.to_array(constant).dtype), name))
    return graph


@pytest.mark.parametrize("form", ["tensor", "encoded"])
@pytest.mark.parametrize("task", TASKS)
def test_each_task_is_compared_by_its_decision(
    tmp_path: Path, start_server: StartServer, task: str, form: Literal["tensor", "encoded"]
) -> None:
    store, state = write_store(tmp_path), tmp_path / "state"
    with (store / task / "config.pbtxt").open("a") as config:
        config.write(ACCEPTS)
    server: Server = start_server("--model-store", store, "--state", state)
    server.wait_ready()
    rollout = graphkiln.rollout(store / task, state=state)

    def compare(version: int) -> Progress:
        """Shadow a version until some answers are compared."""
        rollout.start(version, shadow=1.0)
        deadline = time.monotonic() + 60
        with Client(server.url) as client:
            model = client.model(task, images=form)
            while (seen := rollout.status().progress).compared < 8:
                assert time.monotonic() < deadline, seen
                list(getattr(model, ASK[task])(IMAGES, batch_size=1))
                time.sleep(0.5)
        rollout.abort()
        return seen

    write_version(with_constant(*EQUAL), tmp_path, task, 2)
    seen = compare(2)
    assert (seen.agreed, seen.disagreed, seen.failed) == (seen.compared, 0, 0)
    write_version(with_constant(*OTHER[task]), tmp_path, task, 3)
    seen = compare(3)
    assert seen.disagreed > 0
    assert seen.examples[0].candidate.startswith(
        {"detector": "0 objects", "segmenter": "dark 100.0%"}.get(task, "cosine")
    )


def test_a_candidate_with_other_labels_is_refused(tmp_path: Path, start_server: StartServer) -> None:
    store, state = write_store(tmp_path), tmp_path / "state"
    server: Server = start_server("--model-store", store, "--state", state)
    server.wait_ready()
    write_version(light_box(), tmp_path, "detector", 2, labels=("light", "dark"))
    with pytest.raises(RolloutError, match="its labels differ from version 1"):
        graphkiln.rollout(store / "detector", state=state).start(2, shadow=1.0)
