"""Which source a request names."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from graphkiln_backend.scoring.errors import ScoringError
from graphkiln_backend.scoring.opening import open_source
from graphkiln_backend.scoring.request import ScoreRequest

REQUEST = ScoreRequest(source="photos", model="m", destination="answers")


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
