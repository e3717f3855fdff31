"""Scoring a graph saved by OneFlow, with preprocessing and labels of its model's configuration."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pytest
import saved_graphs
from PIL import Image

from graphkiln_backend.cache.settings import CacheSettings
from graphkiln_backend.cache.store import ArtifactCache
from graphkiln_backend.graph.dtypes import AnyArray
from graphkiln_backend.graph.preprocess import Preprocess
from graphkiln_backend.images.decoding import load_sample
from graphkiln_backend.scoring.messages import Row, ScoreRequest
from graphkiln_backend.scoring.model import read_model, read_run_model

pytestmark = pytest.mark.slow

SPEC = Preprocess(crop=(16, 16))
CONFIG = f"""
backend: "oneflow"
max_batch_size: 4
input [ {{ name: "INPUT_0" data_type: TYPE_FP32 dims: [ 3, 16, 16 ] }} ]
output [ {{ name: "OUTPUT_0" data_type: TYPE_FP32 dims: [ 10 ] label_filename: "labels.txt" }} ]
parameters {{ key: "preprocess" value {{ string_value: {json.dumps(SPEC.to_json())} }} }}
"""


def image(seed: int) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (16, 16, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def unpack_model(folder: Path) -> Path:
    model = folder / "store" / "cnn"
    (model / "1").mkdir(parents=True)
    (saved_graphs.unpack("models.zip", folder / "unpacked", "cnn") / "cnn" / "model").rename(model / "1" / "model")
    (model / "labels.txt").write_text("".join(f"label {index}\n" for index in range(10)))
    (model / "config.pbtxt").write_text(CONFIG)
    return model


def test_driver_converts_the_graph(tmp_path: Path) -> None:
    request = ScoreRequest(
        source="in",
        model=unpack_model(tmp_path),
        destination="out",
        backends=frozenset({"graphkiln", "oneflow"}),
        cache=tmp_path / "cache",
    )
    read_run_model(request, tmp_path)
    with CacheSettings(folder=request.cache).checked().open(tmp_path / "vanishing") as cache:
        kept = [entry.entry.kind for entry in cache.entries()]
        read_model(request, cache, 1)
        assert kept
        assert [entry.entry.kind for entry in cache.entries()] == kept, "nothing is converted again"


def test_labels_and_digest_of_saved_files(tmp_path: Path, cache: ArtifactCache) -> None:
    model = unpack_model(tmp_path)
    request = ScoreRequest(
        source="in", model=model, destination="out", backends=frozenset({"graphkiln", "oneflow"}), top_k=10
    )
    found = read_model(request, cache, 1)
    assert any("model.mlir" in name for name in found._content())
    proven = found.deployment.build(cache)
    rows = [Row(id=str(seed), load=lambda seed=seed: image(seed)) for seed in range(6)]  # type: ignore[misc]
    with proven.session, found.scorer(proven, request, 1, cache) as scorer:
        table = scorer.answer(rows).table.to_pylist()
        for seed, row in enumerate(table):
            sample: AnyArray = load_sample(image(seed), SPEC)[None]
            (scores,) = proven.session.run({"INPUT_0": sample}).values()
            assert row["error"] is None
            assert row["labels"] == [f"label {index}" for index in row["indices"]]
            np.testing.assert_allclose(row["scores"], np.sort(scores[0])[::-1], rtol=1e-4)
