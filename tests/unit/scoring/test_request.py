"""What of a request changes an answer, and what does not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from graphkiln_backend.lowering.settings import Override
from graphkiln_backend.scoring.request import ScoreRequest

REQUEST = ScoreRequest(source="photos", destination="answers", model="store/m")
INT8, FP32 = Override("precision", "int8", "--set"), Override("precision", "fp32", "--set")


@pytest.mark.parametrize(
    "change",
    [
        {"overrides": (INT8,)},
        {"top_k": 4},
        {"scores": True},
        {"outputs": ("OUTPUT_0",)},
        {"keep_columns": ("a",)},
        {"keep_columns": ("a", "b")},
        {"image_column": "a"},
        {"id_column": "a"},
    ],
)
def test_what_changes_what_is_written(change: dict[str, Any]) -> None:
    assert replace(REQUEST, **change).facts() != REQUEST.facts()


@pytest.mark.parametrize(
    "change", [{"workers": 7}, {"cores_per_worker": 3}, {"address": "ray://head"}, {"replace": True}, {"ledger": "x"}]
)
def test_where_it_is_computed_does_not(change: dict[str, Any]) -> None:
    assert replace(REQUEST, **change).facts() == REQUEST.facts()


def test_the_first_of_two_settings_decides_so_their_order_counts() -> None:
    assert replace(REQUEST, overrides=(INT8, FP32)).facts() != replace(REQUEST, overrides=(FP32, INT8)).facts()


def test_where_a_setting_was_written_does_not_count() -> None:
    elsewhere = Override("precision", "int8", "graphkiln.scoring")
    assert replace(REQUEST, overrides=(INT8,)).facts() == replace(REQUEST, overrides=(elsewhere,)).facts()
