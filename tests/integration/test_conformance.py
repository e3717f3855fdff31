"""A slice of ONNX's test suite on the real server, so that `scripts/conformance` keeps working."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from conforming import cases
from conforming.__main__ import run
from conforming.report import BARE, SERVED, find_violations

pytestmark = [pytest.mark.server, pytest.mark.slow]

# Numbers, a sequence inside, text, initializers that are inputs; and an operator that ONNX Runtime does not know.
SLICE = {
    "simple_shrink": "passes",
    "simple_sequence_model4": "passes",
    "simple_strnorm_model_nostopwords_nochangecase": "passes",
    "light_light_squeezenet": "passes",
    "simple_gradient_of_add": "refused",
}


def test_slice_of_the_suite(tmp_path: Path) -> None:
    found = [*cases._folder_cases(), *cases._light_cases()]  # those of single nodes take long to make
    document = run([case for case in found if case.served_name in SLICE], [BARE, SERVED], tmp_path)
    assert find_violations(document) == []
    kept = [json.loads(line) for line in (tmp_path / f"{SERVED}.jsonl").read_text().splitlines()]
    assert {each["case"]: each["verdict"] for each in kept} == SLICE
