"""Small models of OneFlow's library: converted, served whole and split, compared with PyTorch."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import library_models
import numpy as np
import pytest
import tiny_t5
from library_models import MODELS, Made, convert_made, difference
from running import Server, Serving

from graphkiln_client import Client

pytestmark = [pytest.mark.server, pytest.mark.slow, pytest.mark.timeout(900)]

# Row by row, as they are compared: stages of such small models compute whole batches by default.
SPLITS = {"whole": "", "staged": "pipeline=2, micro_batches=32", "sharded": "tensor=2"}
# Another engine's limit in fp32, as in `tests/families`.
_MOST_ERROR = 1e-4


def served_as(name: str, split: str) -> str:
    return f"{re.sub(r'[^a-z0-9]+', '-', name.lower())}-{split}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the store; models are added when a test needs them."""
    folder = tmp_path_factory.mktemp("library")
    (folder / "store").mkdir()
    return folder


@pytest.fixture(scope="module")
def t5(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a T5."""
    return tiny_t5.save(tmp_path_factory.mktemp("t5"))


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    """Server for all tests; each loads its models."""
    with Serving(folder, "--model-store", folder / "store", "--model-control-mode=explicit") as running:
        running.wait_until(lambda: running.status("/v2/health/live") == 200)
        yield running


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[Client]:
    with Client(server.url, timeout_s=300.0) as client:
        yield client


def add(name: str, made: Made, folder: Path, splits: Iterable[str] = SPLITS) -> None:
    """Add a converted model, once per split."""
    version = convert_made(made, name, folder / "converted").graph_path.parent
    text = (version.parent / "config.pbtxt").read_text()
    for split in splits:
        target = folder / "store" / served_as(name, split)
        shutil.copytree(version.parent, target)
        config = re.sub(r'^name: "[^"]*"', f'name: "{target.name}"', text, count=1, flags=re.MULTILINE)
        numbers = SPLITS[split]
        config += f'\nparameters {{ key: "parallel" value {{ string_value: "{numbers}" }} }}' if numbers else ""
        (target / "config.pbtxt").write_text(config)


@contextmanager
def loaded(client: Client, *names: str) -> Iterator[None]:
    """Load models until the end of the block."""
    for name in names:
        client.load(name)
    try:
        yield
    finally:
        for name in names:
            client.unload(name)


@pytest.mark.parametrize("name", MODELS)
def test_whole_and_split_models_equal_the_library(name: str, folder: Path, client: Client, tmp_path: Path) -> None:
    made = MODELS[name](tmp_path, True)
    add(name, made, folder)
    whole, staged, sharded = (served_as(name, split) for split in SPLITS)
    with loaded(client, whole):
        together = client.model(whole).infer(made.feeds)
        rows = [{key: array[row : row + 1] for key, array in made.feeds.items()} for row in range(3)]
        alone = [client.model(whole).infer(row) for row in rows]
    assert difference(together, made.expected) <= _MOST_ERROR
    with loaded(client, staged):
        by_stages = client.model(staged).infer(made.feeds)
    for key in made.expected:
        np.testing.assert_array_equal(by_stages[key], np.concatenate([row[key] for row in alone]))
    with loaded(client, sharded):
        assert difference(client.model(sharded).infer(made.feeds), made.expected) <= _MOST_ERROR


@pytest.mark.parametrize("split", SPLITS)
def test_t5_generation_over_two_graphs_equals_transformers(split: str, folder: Path, t5: Path, client: Client) -> None:
    """Greedy; two texts of different lengths in a batch; the client keeps the cache."""
    random = np.random.default_rng(8)
    tokens, mask = random.integers(2, tiny_t5.WORDS, (2, 9)), np.array([[1] * 9, [1] * 6 + [0] * 3])
    expected = tiny_t5.generate(tiny_t5.load(t5), tokens, mask, 6)
    assert len(set(expected.flatten().tolist())) > 3, "the same token again and again would say little"
    for part, kind in (("encode", "huggingface"), ("step", "decoder")):
        if not (folder / "converted" / part).exists():
            add(part, Made(source=f"{kind}:{t5}", feeds={}, expected={}), folder)
    encode, step = served_as("encode", split), served_as("step", split)
    with loaded(client, encode, step):
        found = tiny_t5.generate_by_steps(
            lambda feeds: client.model(encode).infer(dict(feeds)),
            lambda feeds: client.model(step).infer(dict(feeds)),
            tokens,
            mask,
            6,
        )
    np.testing.assert_array_equal(found, expected)


def test_every_model_of_the_library_is_covered() -> None:
    assert {name.split()[0] for name in library_models.MODELS} == {"BERT", "GPT-2", "T5", "ViT", "Swin", "MoCo", "MAE"}
