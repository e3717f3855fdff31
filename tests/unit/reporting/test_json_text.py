"""Standard JSON, without NaN and infinity."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from graphkiln.reporting.json_text import finite, json_text


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_nan_and_infinity_are_null(number: float) -> None:
    document = {"a": [1.5, number], "b": {"c": (number, "NaN", None, 2)}}
    expected = {"a": [1.5, None], "b": {"c": [None, "NaN", None, 2]}}
    assert finite(document) == expected
    for text in (json_text(document), json_text(document, indent=2), json_text(document, compact=True)):
        assert json.loads(text, parse_constant=pytest.fail) == expected


def test_other_values_are_unchanged() -> None:
    document: dict[str, Any] = {"a": [1, 2.5, True, None], "b": "ü"}
    assert json_text(document) == json.dumps(document)
    assert json_text(document, indent=2) == json.dumps(document, indent=2)
    assert json_text(document, compact=True) == '{"a":[1,2.5,true,null],"b":"\\u00fc"}'
