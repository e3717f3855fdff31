"""What is kept of a split graph: compiled once, by content, and compared with its checksums at each start."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import split_graphs
from graphs import draw
from split_graphs import spread

from graphkiln_backend.cache.store import ArtifactCache, read_entry
from graphkiln_backend.engines.base import SessionConfig
from graphkiln_backend.engines.onnxruntime import OnnxRuntimeEngine
from graphkiln_backend.graph.device import Place
from graphkiln_backend.graph.dtypes import AnyArray
from graphkiln_backend.graph.errors import LoweringError
from graphkiln_backend.graph.precision import Precision
from graphkiln_backend.lowering.artifacts import Artifacts
from graphkiln_backend.lowering.parallel import parts as part_artifacts
from graphkiln_backend.lowering.parallel.building import build_split
from graphkiln_backend.lowering.parallel.parts import (
    PreparedParts,
    config_at,
    graph_of,
    prepare_parts,
    read_parts,
)
from graphkiln_backend.repository.onnx_file import read_signature
from graphkiln_backend.repository.version import read_version

X = draw(4, 3, 16, 16, seed=1)


class Counting(OnnxRuntimeEngine):
    """Notes what it compiles."""

    def __init__(self) -> None:
        self.compiled: list[str] = []

    def compile(self, graph_path: Path, config: SessionConfig, folder: Path) -> None:
        self.compiled.append(graph_path.name)
        super().compile(graph_path, config, folder)


class Setting:
    """A graph, how it is split, and a cache that stays."""

    def __init__(self, folder: Path) -> None:
        self.graph = split_graphs.save(split_graphs.convolutions(), folder / "whole")
        self.config = spread(self.graph, folder / "by hand", 2)
        self.by_hand = PreparedParts(folder=folder / "by hand")
        self.cache = folder / "cache"

    def start(self, *, lasting: bool = True, config: SessionConfig | None = None) -> list[str]:
        """Builds the session as a start does, asks it, and says what was compiled for that."""
        engine, config = Counting(), config or self.config
        with ArtifactCache(self.cache, lasting=lasting) as cache:
            prepared = prepare_parts(self.artifacts(cache), engine, config)
            self.answer = self.ask(engine, prepared, config)
        return engine.compiled

    def ask(self, engine: OnnxRuntimeEngine, prepared: PreparedParts, config: SessionConfig) -> AnyArray:
        with build_split(engine, prepared, config, read_signature(self.graph)) as session:
            return session.run({"x": X})["y"]

    def artifacts(self, cache: ArtifactCache) -> Artifacts:
        return Artifacts(read_version(self.graph.parent), Precision.FP32, cache)

    def compiled_entries(self) -> list[Path]:
        entries = sorted(self.cache.glob("entries/onnxruntime-*"))
        assert all(read_entry(entry) for entry in entries)
        return entries


@pytest.fixture
def setting(tmp_path: Path) -> Setting:
    return Setting(tmp_path)


def test_a_second_start_compiles_nothing_and_cuts_nothing(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    assert setting.start() == ["part-0-shard-0.onnx", "part-1-shard-0.onnx"]
    first = setting.answer
    monkeypatch.setattr(part_artifacts, "write_parts", None)
    assert setting.start() == []
    np.testing.assert_array_equal(setting.answer, first)


def test_damage_to_one_stage_is_found_and_only_that_one_is_made_again(
    setting: Setting, caplog: pytest.LogCaptureFixture
) -> None:
    setting.start()
    first, (entry, _) = setting.answer, setting.compiled_entries()
    damaged = next(path for path in entry.iterdir() if path.name != "entry.json" and path.suffix != ".json")
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 1
    damaged.write_bytes(content)
    with caplog.at_level(logging.WARNING):
        assert len(setting.start()) == 1
    assert f"{damaged.name} is damaged" in caplog.text
    np.testing.assert_array_equal(setting.answer, first)
    assert setting.start() == []


def test_parts_that_are_not_listed_are_compiled_again(setting: Setting) -> None:
    """A compiled part without its `parts.json` is a damaged entry."""
    setting.start()
    for entry in setting.compiled_entries():
        (entry / "parts.json").unlink()
    assert len(setting.start()) == 2


def test_other_content_or_other_cuts_are_other_artifacts(setting: Setting) -> None:
    setting.start()
    three = spread(setting.graph, setting.by_hand.folder, 3)
    assert len(setting.start(config=three)) == 3
    (setting.graph.parent / "weights.bin").write_bytes(b"beside the graph")
    assert len(setting.start()) == 2
    assert len(setting.compiled_entries()) == 7


def test_parts_of_a_graph_that_is_replaced_meanwhile_are_not_kept(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = part_artifacts.write_parts

    def slow(*arguments: Any) -> None:
        write(*arguments)
        setting.graph.write_bytes(setting.graph.read_bytes() + b"")

    monkeypatch.setattr(part_artifacts, "write_parts", slow)
    with pytest.raises(LoweringError, match="was replaced"):
        setting.start()
    assert not list(setting.cache.glob("entries/*"))


class TestWhereNothingIsCompiled:
    def test_in_a_cache_that_vanishes(self, setting: Setting) -> None:
        assert setting.start(lasting=False) == []
        assert not setting.compiled_entries()

    def test_for_an_engine_that_keeps_nothing(self, setting: Setting) -> None:
        off = replace(setting.config, tuning=replace(setting.config.tuning, graph_level="off"))
        with ArtifactCache(setting.cache) as cache:
            prepared = prepare_parts(setting.artifacts(cache), OnnxRuntimeEngine(), off)
            assert not prepared.compiled
            assert graph_of(prepared.folder, 1, 0).is_file()
            assert read_parts(prepared.folder).stages == 2


def test_a_part_runs_alone_on_the_cores_of_its_place(setting: Setting) -> None:
    place = Place(setting.config.device, (4, 5))
    own = config_at(replace(setting.config, threads=8), place)
    assert (own.threads, own.parallel, own.places, own.cuts) == (2, None, (), ())
    assert config_at(replace(setting.config, threads=8), Place(setting.config.device)).threads == 8


class TestSpinning:
    """Threads of a part that is done stop spinning where the next part of the shard needs their cores."""

    STOP = "session.force_spinning_stop"

    def entries(self, setting: Setting, *, shards: int, cores: int, own: str = "") -> object:
        numbers = replace(setting.config.parallel, pipeline=1, tensor=shards) if setting.config.parallel else None
        tuning = replace(setting.config.tuning, config_entries={self.STOP: own} if own else {})
        config = replace(setting.config, threads=8, parallel=numbers, tuning=tuning)
        return config_at(config, Place(config.device, tuple(range(cores)))).tuning.config_entries

    def test_of_shards_of_several_cores(self, setting: Setting) -> None:
        assert self.entries(setting, shards=2, cores=4) == {self.STOP: "1"}

    def test_what_a_person_says_counts(self, setting: Setting) -> None:
        assert self.entries(setting, shards=2, cores=4, own="0") == {self.STOP: "0"}
