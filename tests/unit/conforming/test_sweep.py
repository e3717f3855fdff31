"""A part of the sweep of edge values, which `scripts/conformance --sweep` runs as a whole."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from conforming.cases import select
from conforming.sweep import Variant, _casts, _variants_of, examine
from graphkiln_backend.engines import openvino_numbers

CASTS = {variant.dtype: variant for variant in _casts()}
WRONG = "INT32 to INT16"


@pytest.mark.parametrize("variant", [*random.Random(0).sample(list(CASTS.values()), 8), CASTS[WRONG]])
def test_the_table_has_all_differences_of_casts(variant: Variant, tmp_path: Path) -> None:
    found = [each for each in examine(variant, tmp_path) if each.verdict in {"differs", "fails"}]
    assert found == []


def test_inputs_that_the_node_does_not_read() -> None:
    (case,) = select("castlike_FLOAT_to_DOUBLE_expanded$")
    assert {"like"} < {*case.feeds(0)}
    assert {variant.operator for variant in _variants_of(case, set())} == {"Cast"}


def test_a_difference_without_a_row_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(openvino_numbers, "TABLE", ())
    verdicts = {each.verdict for each in examine(CASTS[WRONG], tmp_path)}
    assert verdicts & {"differs", "refused by the self-test"}
