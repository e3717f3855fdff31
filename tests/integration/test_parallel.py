"""Models split over groups of cores, served: equal outputs, each group on its cores, faults reported."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
import split_graphs
from graphs import compute, draw
from running import Server, Serving, is_stub

from graphkiln_backend.graph.dtypes import AnyArray
from graphkiln_client import Client

pytestmark = [pytest.mark.server, pytest.mark.slow]

SPREAD = {
    "whole": "",
    "staged": "pipeline=2, micro_batches=4",
    "sharded": "tensor=2",
    "copies": "data=2",
    "shared": "data=1, pipeline=2",
    "chosen": "auto, memory=1MiB",
}
GROUPS = {
    "copies": "\ninstance_group [ { count: 2 kind: KIND_CPU } ]",
    "shared": '\ninstance_group [ { name: "one" count: 1 kind: KIND_CPU }, { name: "other" count: 1 kind: KIND_CPU } ]',
}
BROKEN = {
    "too-many": ("pipeline=999", "needs 999 groups of cores"),
    "odd": ("tensor=2, micro_batches=3", "with pipeline=2 or more where micro_batches is given"),
    "unfit": ("pipeline=2, memory=1KiB", "no split into 2 stages fits 1 KiB for each device"),
    "alone": ("data=3", "data=3 asks for as many instances of the model"),
}


@pytest.fixture(scope="module")
def store(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example under several names, and a block of a transformer."""
    folder = tmp_path_factory.mktemp("store")
    text = (digits / "config.pbtxt").read_text()
    given = {**SPREAD, **{name: numbers for name, (numbers, _) in BROKEN.items()}}
    for name, numbers in given.items():
        if name == "sharded":
            split_graphs.save(split_graphs.attention(), folder / name / "1")
            config = 'backend: "graphkiln" max_batch_size: 8'
        else:
            shutil.copytree(digits, folder / name)
            config = text.replace('name: "digits"', f'name: "{name}"')
        config += GROUPS.get(name, "")
        config += f'\nparameters {{ key: "parallel" value {{ string_value: "{numbers}" }} }}' if numbers else ""
        (folder / name / "config.pbtxt").write_text(config)
    return folder


@pytest.fixture(scope="module")
def spread(store: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Serving(
        tmp_path_factory.mktemp("server"), "--model-store", store, "--exit-on-error=false", "--log-info=true"
    ) as running:
        running.wait_until(lambda: "serving HTTP" in running.log)
        yield running


def images(count: int) -> AnyArray:
    return draw(count, 1, 32, 32, seed=3)


@pytest.mark.parametrize("name", ["staged", "copies", "shared", "chosen"])
def test_outputs_equal_the_whole_model(spread: Server, name: str) -> None:
    """The same bits for one row, also if a pipeline computes a batch row by row."""
    with Client(spread.url) as client:
        x = images(4)
        alone = [client.model("whole").infer({"INPUT_0": x[row : row + 1]})["OUTPUT_0"] for row in range(4)]
        one = client.model(name).infer({"INPUT_0": x[:1]})["OUTPUT_0"]
        np.testing.assert_array_equal(one, alone[0])
        four = client.model(name).infer({"INPUT_0": x})["OUTPUT_0"]
        if name == "staged":
            np.testing.assert_array_equal(four, np.concatenate(alone))
        np.testing.assert_allclose(four, np.concatenate(alone), rtol=1e-4, atol=1e-5)


def test_shards_equal_the_graph(spread: Server) -> None:
    x = draw(3, 5, 24, seed=4)
    with Client(spread.url) as client:
        found = client.model("sharded").infer({"x": x})["y"]
    np.testing.assert_allclose(found, compute(split_graphs.attention(), x=x)["y"], rtol=1e-4, atol=1e-5)


def test_copies_stay_on_separate_cores(spread: Server) -> None:
    """Each of the two instances has half of the cores; those of other models have all of them."""
    usable = os.sched_getaffinity(0)
    children = psutil.Process(spread.process.pid).children(recursive=True)
    kept = [set(child.cpu_affinity()) for child in children if is_stub(child)]
    halves = [cores for cores in kept if len(cores) < len(usable)]
    assert len(halves) == 2
    assert not halves[0] & halves[1]
    assert halves[0] | halves[1] == usable


def test_plan_is_logged(spread: Server) -> None:
    flat = re.sub(r"\s+", " ", spread.log)
    assert "parallel: pipeline=2, tensor=1, micro_batches=4" in flat
    assert "rejected: pipeline=1, tensor=1: no split into 1 stage fits" in flat


@pytest.mark.parametrize("name", BROKEN)
def test_impossible_settings_are_load_errors(spread: Server, name: str) -> None:
    flat = re.sub(r"\s+", " ", spread.log)
    assert BROKEN[name][1] in flat
    assert spread.status(f"/v2/models/{name}/ready") != 200
    assert spread.status("/v2/models/whole/ready") == 200
