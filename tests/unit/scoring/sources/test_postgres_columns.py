"""What a column of PostgreSQL becomes; `test_postgres` reads them from a server."""

from __future__ import annotations

import pytest

from graphkiln_backend.scoring.errors import ScoringError
from graphkiln_backend.scoring.sources.postgres import _TYPES, _only_bytes, as_array


def test_types_stand_where_nothing_does() -> None:
    for kind in _TYPES.values():
        assert as_array(None, kind).type == kind


def test_what_is_not_clear_is_asked() -> None:
    assert _only_bytes({"id": 20, "image": 17}, "photos") == "image"
    for types in ({"id": 20}, {"a": 17, "b": 17}):
        with pytest.raises(ScoringError, match="--image-column"):
            _only_bytes(types, "photos")
