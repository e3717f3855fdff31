"""Model stores with small graphs for integration tests."""

from __future__ import annotations

from pathlib import Path

import pytest
import zoo


@pytest.fixture
def slow_store(tmp_path: Path) -> Path:
    """Store with the model `slow`, which computes as many matrix products as a request asks for."""
    store = tmp_path / "slow store"
    zoo.add(store, "slow", zoo.slow(), 'backend: "graphkiln" max_batch_size: 1')
    return store


@pytest.fixture
def lookup_store(tmp_path: Path) -> Path:
    """Store with the model `lookup`."""
    zoo.add_lookup(tmp_path / "store")
    return tmp_path / "store"
