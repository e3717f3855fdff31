"""What was found out about a session is kept, by all that it depends on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from graphkiln_backend.cache.store import ArtifactCache
from graphkiln_backend.engines.base import Placement
from graphkiln_backend.graph.errors import CacheError
from graphkiln_backend.graph.precision import Precision
from graphkiln_backend.lowering.artifacts import Artifacts
from graphkiln_backend.lowering.proven_session import Observations, ReadPlacement, keep_observations, read_observations
from graphkiln_backend.repository.version import ModelVersion

PLACEMENT = Placement(
    nodes={"CPU": 3}, precision="unknown", products={Precision.BF16: 2, "fp64": 1}, elsewhere=("conv",)
)
OBSERVATIONS = Observations(
    complete=True, placed=ReadPlacement.of(PLACEMENT), mixed="a row", repeats=True, warmed=(2, 8, 8)
)


@pytest.fixture
def artifacts(bare: ModelVersion, tmp_path: Path) -> Iterator[Artifacts]:
    with ArtifactCache(tmp_path / "cache") as cache:
        yield Artifacts(bare, Precision.FP32, cache)


@pytest.fixture
def engine(add_engine: Any) -> Any:
    return add_engine("engine", facts={"release": "1"})


def test_what_is_kept_is_read(artifacts: Artifacts, engine: Any) -> None:
    assert read_observations(artifacts, engine, engine.config, {"batch": "1"}) == Observations()
    keep_observations(artifacts, engine, engine.config, {"batch": "1"}, OBSERVATIONS)
    assert read_observations(artifacts, engine, engine.config, {"batch": "1"}) == OBSERVATIONS
    assert read_observations(artifacts, engine, engine.config, {"batch": "2"}) == Observations()
    others = replace(engine.config, threads=2)
    assert read_observations(artifacts, engine, others, {"batch": "1"}) == Observations()


def test_a_placement_is_what_it_was(artifacts: Artifacts, engine: Any) -> None:
    keep_observations(artifacts, engine, engine.config, {}, OBSERVATIONS)
    placed = read_observations(artifacts, engine, engine.config, {}).placed
    assert placed is not None
    assert placed.placement == PLACEMENT
    assert {type(name) for name in placed.placement.products} == {Precision, str}


def test_the_first_to_find_it_keeps_it(artifacts: Artifacts, engine: Any) -> None:
    keep_observations(artifacts, engine, engine.config, {}, OBSERVATIONS)
    keep_observations(artifacts, engine, engine.config, {}, replace(OBSERVATIONS, mixed=""))
    assert read_observations(artifacts, engine, engine.config, {}) == OBSERVATIONS


def test_what_cannot_be_read_is_looked_for_again(
    artifacts: Artifacts, engine: Any, logged: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    keep_observations(artifacts, engine, engine.config, {}, OBSERVATIONS)
    monkeypatch.setattr(json, "loads", lambda _: {"complete": "yes"})
    assert read_observations(artifacts, engine, engine.config, {}) == Observations()
    assert "cannot be read: 'complete' must be" in logged[-1]


def test_a_cache_that_cannot_be_written_is_no_fault(
    artifacts: Artifacts, engine: Any, logged: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> object:
        raise CacheError("the disk is full")

    monkeypatch.setattr(ArtifactCache, "reserve", fail)
    keep_observations(artifacts, engine, engine.config, {}, OBSERVATIONS)
    assert read_observations(artifacts, engine, engine.config, {}) == Observations()
    assert logged[0] == "what was found out about engine on cpu is not remembered: the disk is full"


def test_nothing_is_kept_in_a_cache_that_vanishes(bare: ModelVersion, engine: Any, tmp_path: Path) -> None:
    with ArtifactCache(tmp_path / "cache", lasting=False) as cache:
        artifacts = Artifacts(bare, Precision.FP32, cache)
        keep_observations(artifacts, engine, engine.config, {}, OBSERVATIONS)
        assert read_observations(artifacts, engine, engine.config, {}) == Observations()


def test_nor_of_an_engine_that_has_no_release(artifacts: Artifacts, add_engine: Any) -> None:
    engine = add_engine("nameless")
    keep_observations(artifacts, engine, engine.config, {}, OBSERVATIONS)
    assert read_observations(artifacts, engine, engine.config, {}) == Observations()
