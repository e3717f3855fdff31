"""Triton's own module, which exists in its stub process only, is replaced by a small one."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import fake_triton
import pytest

sys.modules["triton_python_backend_utils"] = fake_triton


@pytest.fixture(autouse=True)
def _reset_triton() -> Iterator[None]:
    yield
    fake_triton.reset()
