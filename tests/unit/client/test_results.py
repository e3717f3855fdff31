"""Classifications and results, parsed and written."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphkiln_backend.graph.errors import ProtocolError
from graphkiln_client.tasks import Classification, Result, ServedModel, classifications


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
    def test_parses_tritons_form(self, text: str, expected: Classification) -> None:
        assert Classification.parse(text) == expected

    @given(st.text(max_size=30))
    def test_never_fails_but_by_a_protocol_error(self, text: str) -> None:
        with contextlib.suppress(ProtocolError):
            Classification.parse(text)


def result(**outputs: tuple[Classification, ...]) -> Result:
    return Result(source="seven.png", model="m", version="3", request_id="id", latency_ms=1.5, outputs=outputs)


ANT, BEE = Classification(index=0, label="ant", score=0.75), Classification(index=1, label="bee", score=0.25)


class TestResult:
    def test_as_plain_data(self) -> None:
        assert result(species=(ANT,)).to_dict() == {
            "source": "seven.png",
            "model": "m",
            "version": "3",
            "request_id": "id",
            "latency_ms": 1.5,
            "classifications": [{"index": 0, "label": "ant", "score": 0.75}],
        }

    def test_several_outputs_are_named(self) -> None:
        rows = result(species=(ANT,), color=(BEE,)).to_dict()["classifications"]
        assert [(row["output"], row["label"]) for row in rows] == [("species", "ant"), ("color", "bee")]

    @pytest.mark.parametrize("score", [math.inf, -math.inf, math.nan])
    def test_what_json_cannot_hold_is_null(self, score: float) -> None:
        document = result(y=(dataclasses.replace(ANT, score=score),)).to_dict()
        assert json.loads(json.dumps(document, allow_nan=False))["classifications"][0]["score"] is None


class TestClassifications:
    def test_each_position_has_its_own_ranking(self) -> None:
        indices, scores = np.array([[[1], [0]], [[0], [1]]]), np.arange(4.0).reshape(2, 2, 1)
        rows = classifications(indices, scores, ("ant", "bee"))
        assert [row.position for row in rows] == [(0, 0), (0, 1), (1, 0), (1, 1)]
        assert [row.label for row in rows] == ["bee", "ant", "ant", "bee"]
        assert [row.score for row in rows] == [0, 1, 2, 3]


class TestServedModel:
    def test_a_row_of_the_index(self) -> None:
        row = {"name": "m", "version": "2", "state": "UNAVAILABLE", "reason": "no such engine"}
        model = ServedModel.parse(row)
        assert dataclasses.asdict(model) == row
        assert not model.ready

    def test_a_reason_is_one_line_without_a_stack(self) -> None:
        reason = "Internal: TritonModelException: m: it is\ncut short\n\nAt:\n  /x/model.py(97): _load\n;"
        assert ServedModel.parse({"name": "m", "reason": reason}).reason == "m: it is cut short"

    @pytest.mark.parametrize("row", [{}, {"name": None}, {"name": 7, "version": "1"}])
    def test_a_row_without_a_name(self, row: dict[str, Any]) -> None:
        with pytest.raises(ProtocolError, match="has no model name"):
            ServedModel.parse(row)
