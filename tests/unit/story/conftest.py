"""Fixtures of digits and of their preprocess spec."""

from __future__ import annotations

from pathlib import Path

import pytest

from graphkiln.story.digits import Digits, split_digits
from graphkiln_backend.graph.preprocess import Preprocess
from graphkiln_backend.repository.version import read_version


@pytest.fixture(scope="module")
def held_out() -> Digits:
    return split_digits()[1].first(4)


@pytest.fixture(scope="module")
def preprocess(digits: Path) -> Preprocess:
    manifest = read_version(digits / "1").manifest
    assert manifest is not None
    assert manifest.preprocess is not None
    return manifest.preprocess
