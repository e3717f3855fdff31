"""Parsing of classifications and output of results."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphkiln_backend.graph.errors import ProtocolError
from graphkiln_client.published import ServedModel
from graphkiln_client.tasks import Classification, Result


class TestClassification:
    @pytest.mark.parametrize(
        ("text", "expected"),
        [
            ("0.5:3:cat", Classification(index=3, label="cat", score=0.5)),
            ("3.630257:499", Classification(index=499, label="", score=3.630257)),
            ("-1e-05:0:a:b", Classification(index=0, label="a:b", score=-1e-5)),
            ("0.5:0:\ufeffcat\r", Classification(index=0, label="cat", score=0.5)),  # of a labels file from Windows
        ],
    )
    def test_parse_classification(self, text: str, expected: Classification) -> None:
        assert Classification.parse(text) == expected

    @given(st.text(max_size=30))
    def test_parse_raises_only_protocol_error(self, text: str) -> None:
        with contextlib.suppress(ProtocolError):
            Classification.parse(text)


def result(**outputs: tuple[Classification, ...]) -> Result:
    return Result(source="seven.png", model="m", version="3", request_id="id", latency_ms=1.5, outputs=outputs)


ANT, BEE = Classification(index=0, label="ant", score=0.75), Classification(index=1, label="bee", score=0.25)


class TestResult:
    def test_to_dict(self) -> None:
        assert result(species=(ANT,)).to_dict() == {
            "source": "seven.png",
            "model": "m",
            "version": "3",
            "request_id": "id",
            "latency_ms": 1.5,
            "classifications": [{"index": 0, "label": "ant", "score": 0.75}],
        }

    @pytest.mark.parametrize("score", [math.inf, -math.inf, math.nan])
    def test_non_finite_score_is_null(self, score: float) -> None:
        document = result(y=(dataclasses.replace(ANT, score=score),)).to_dict()
        assert json.loads(json.dumps(document, allow_nan=False))["classifications"][0]["score"] is None


class TestServedModel:
    def test_reason_is_one_line(self) -> None:
        reason = "Internal: TritonModelException: m: it is\ncut short\n\nAt:\n  /x/model.py(97): _load\n;"
        assert ServedModel.parse({"name": "m", "reason": reason}).reason == "m: it is cut short"

    @pytest.mark.parametrize("row", [{}, {"name": None}, {"name": 7, "version": "1"}])
    def test_row_without_a_name(self, row: dict[str, Any]) -> None:
        with pytest.raises(ProtocolError, match="has no model name"):
            ServedModel.parse(row)
