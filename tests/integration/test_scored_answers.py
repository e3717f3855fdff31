"""`score` gives what a client of the real server gets: the same classes and bits of their scores."""

from __future__ import annotations

from pathlib import Path

import pytest
from running import Server

from graphkiln_backend.cache.store import ArtifactCache
from graphkiln_backend.scoring.messages import Row, ScoreRequest
from graphkiln_backend.scoring.model import read_model
from graphkiln_client import Client

pytestmark = pytest.mark.server


@pytest.mark.parametrize("softmax", [False, True])
def test_results_equal_the_servers(
    softmax: bool, server: Server, repository: Path, digits: Path, cache: ArtifactCache
) -> None:
    images = sorted((repository / "docs" / "digits").glob("*.png"))
    request = ScoreRequest(
        source="in", model=digits, destination="out", backends=frozenset({"graphkiln"}), top_k=10, softmax=softmax
    )
    model = read_model(request, cache, 2)
    proven = model.deployment.build(cache)
    with proven.session, model.scorer(proven, request, 2, cache) as scorer, Client(server.url) as client:
        table = scorer.answer([Row(id=str(path), load=path.read_bytes) for path in images]).table
        answers = [client.model("digits").classify(path, top_k=10, softmax=softmax) for path in images]
    for row, answer in zip(table.to_pylist(), answers, strict=True):
        assert row["id"] == answer.source
        assert row["indices"] == [one.index for one in answer.classifications]
        assert row["labels"] == [one.label for one in answer.classifications]
        assert row["scores"] == [one.score for one in answer.classifications]
        assert (row["model"], str(row["version"])) == (answer.model, answer.version)
