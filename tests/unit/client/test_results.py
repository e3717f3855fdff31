"""Classifications and results, parsed and written."""

from __future__ import annotations

import contextlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphkiln_backend.graph.errors import ProtocolError
from graphkiln_client.results import Classification, Result


class TestResults:
    @pytest.mark.parametrize(
        ("text", "expected"),
        [
            ("0.5:3:cat", Classification(index=3, label="cat", score=0.5)),
            ("3.630257:499", Classification(index=499, label="", score=3.630257)),
            ("-1e-05:0:a:b", Classification(index=0, label="a:b", score=-1e-5)),
        ],
    )
    def test_parses_tritons_form(self, text: str, expected: Classification) -> None:
        assert Classification.parse(text) == expected

    @given(st.text(max_size=30))
    def test_never_fails_but_by_a_protocol_error(self, text: str) -> None:
        with contextlib.suppress(ProtocolError):
            Classification.parse(text)

    def test_json_has_no_nan(self) -> None:
        answer = Classification(index=0, label="", score=float("nan"))
        result = Result(source="s", model="m", version="1", request_id="", latency_ms=1.0, outputs={"y": (answer,)})
        assert json.loads(json.dumps(result.to_dict(), allow_nan=False))["classifications"][0]["score"] is None
