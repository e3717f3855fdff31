"""Which source a request names."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from graphkiln_backend.scoring.errors import ScoringError
from graphkiln_backend.scoring.opening import open_source
from graphkiln_backend.scoring.request import ScoreRequest
from graphkiln_backend.scoring.sources.files import FileSource
from graphkiln_backend.scoring.sources.postgres import TableSource

REQUEST = ScoreRequest(source="photos", model="m", destination="answers")


def test_a_source_is_opened_without_looking_at_it() -> None:
    assert isinstance(open_source(REQUEST), FileSource)
    assert isinstance(open_source(replace(REQUEST, source="s3://bucket/photos")), FileSource)
    database = replace(REQUEST, source="postgresql://nowhere/db", query="photos", id_column="id")
    assert isinstance(open_source(database), TableSource)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query": "photos"}, "photos is no database"),
        ({"keep_columns": ("a", "id")}, "has its own column 'id'"),
        ({"keep_columns": ("a", "model")}, "has its own column 'model'"),
        ({"source": "postgres://host/db", "id_column": "id"}, "--query"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ScoringError, match=message):
        open_source(replace(REQUEST, **change))
