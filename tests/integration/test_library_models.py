"""The models of OneFlow's library, small: converted, served whole and split, beside PyTorch and beside the whole.

`scripts/benchmark models` does the same with those of usual size, and writes the table of `docs/parallel.md`.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import library_models
import numpy as np
import pytest
import tiny_t5
from library_models import MODELS, Made
from library_split import convert_made, difference
from running import Server, Serving

from graphkiln_backend.graph.dtypes import AnyArray
from graphkiln_client import Client

pytestmark = [pytest.mark.server, pytest.mark.slow, pytest.mark.timeout(900)]

SPLITS = {"whole": "", "staged": "pipeline=2, micro_batches=32", "sharded": "tensor=2"}
"""Stages of models so small compute batches at once unless they are told: here row by row, as they are compared."""
_MOST_ERROR = 1e-4
"""Another engine's limit in fp32, as in `tests/families`."""


def served_as(name: str, split: str) -> str:
    return f"{re.sub(r'[^a-z0-9]+', '-', name.lower())}-{split}"


def add_splits(version: Path, name: str, store: Path) -> None:
    """A converted model under a name for each split."""
    text = (version.parent / "config.pbtxt").read_text()
    for split, numbers in SPLITS.items():
        shutil.copytree(version.parent, store / served_as(name, split))
        config = re.sub(r'name: "[^"]*"', f'name: "{served_as(name, split)}"', text, count=1)
        config += f'\nparameters {{ key: "parallel" value {{ string_value: "{numbers}" }} }}' if numbers else ""
        (store / served_as(name, split) / "config.pbtxt").write_text(config)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Made]:
    """All models, small."""
    return {name: make(tmp_path_factory.mktemp("files"), True) for name, make in MODELS.items()}


@pytest.fixture(scope="module")
def t5(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a T5."""
    return tiny_t5.save(tmp_path_factory.mktemp("t5"))


@pytest.fixture(scope="module")
def store(made: dict[str, Made], t5: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    converted, folder = tmp_path_factory.mktemp("converted"), tmp_path_factory.mktemp("store")
    halves = {
        "encode": Made(source=f"huggingface:{t5}", feeds={}, expected={}),
        "step": Made(source=f"decoder:{t5}", feeds={}, expected={}),
    }
    for name, each in {**made, **halves}.items():
        add_splits(convert_made(each, name, converted).graph_path.parent, name, folder)
    return folder


@pytest.fixture(scope="module")
def server(store: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One server for all; each test loads what it asks."""
    folder = tmp_path_factory.mktemp("server")
    with Serving(folder, "--model-store", store, "--model-control-mode=explicit", "--log-info=true") as running:
        running.wait_until(lambda: running.status("/v2/health/live") == 200)
        yield running


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[Client]:
    with Client(server.url, timeout_s=300.0) as client:
        yield client


def ask(client: Client, model: str, feeds: dict[str, AnyArray]) -> dict[str, AnyArray]:
    client.load(model)
    try:
        return dict(client.model(model).infer(feeds))
    finally:
        client.unload(model)


@pytest.mark.parametrize("name", MODELS)
def test_served_whole_and_split_as_the_library_computes(name: str, made: dict[str, Made], client: Client) -> None:
    feeds, expected = made[name].feeds, made[name].expected
    rows = [{key: array[row : row + 1] for key, array in feeds.items()} for row in range(3)]
    whole = served_as(name, "whole")
    client.load(whole)
    alone = [dict(client.model(whole).infer(row)) for row in rows]
    together = dict(client.model(whole).infer(feeds))
    client.unload(whole)
    assert difference(together, expected) <= _MOST_ERROR
    staged = ask(client, served_as(name, "staged"), feeds)
    for key in expected:
        np.testing.assert_array_equal(staged[key], np.concatenate([row[key] for row in alone]))
    sharded = ask(client, served_as(name, "sharded"), feeds)
    assert difference(sharded, expected) <= _MOST_ERROR


@pytest.mark.parametrize("split", SPLITS)
def test_a_t5_generates_over_two_served_graphs_as_transformers_does(split: str, t5: Path, client: Client) -> None:
    """Greedily, two texts of different lengths in a batch, the cache kept by the client."""
    random = np.random.default_rng(8)
    tokens, mask = random.integers(2, tiny_t5.WORDS, (2, 9)), np.array([[1] * 9, [1] * 6 + [0] * 3])
    expected = tiny_t5.generate(tiny_t5.load(t5), tokens, mask, 6)
    assert len(set(expected.flatten().tolist())) > 3, "the same token again and again would say little"
    encode, step = served_as("encode", split), served_as("step", split)
    for name in (encode, step):
        client.load(name)
    found = tiny_t5.generate_by_steps(
        lambda feeds: client.model(encode).infer(dict(feeds)),
        lambda feeds: client.model(step).infer(dict(feeds)),
        tokens,
        mask,
        6,
    )
    for name in (encode, step):
        client.unload(name)
    np.testing.assert_array_equal(found, expected)


def test_every_model_of_the_library_is_here() -> None:
    assert {name.split()[0] for name in library_models.MODELS} == {"BERT", "GPT-2", "T5", "ViT", "Swin", "MoCo", "MAE"}
