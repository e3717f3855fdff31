"""Parts of a split graph: their files, costs, and compiled artifacts in the cache."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir
import pytest
import split_graphs
from graphs import draw
from split_graphs import spread

from graphkiln_backend.cache.store import ArtifactCache, read_entry
from graphkiln_backend.engines.base import SessionConfig
from graphkiln_backend.engines.onnxruntime import OnnxRuntimeEngine
from graphkiln_backend.graph.device import Parallelism, Place
from graphkiln_backend.graph.dtypes import AnyArray
from graphkiln_backend.graph.errors import CacheError, LoweringError
from graphkiln_backend.graph.precision import Precision
from graphkiln_backend.lowering.artifacts import Artifacts
from graphkiln_backend.lowering.parallel import parts as part_artifacts
from graphkiln_backend.lowering.parallel.building import build_split
from graphkiln_backend.lowering.parallel.parts import (
    PreparedParts,
    config_at,
    count_costs,
    graph_of,
    prepare_parts,
    read_parts,
    write_parts,
)
from graphkiln_backend.lowering.parallel.stages import find_cuts
from graphkiln_backend.repository.onnx_file import read_signature
from graphkiln_backend.repository.version import read_version


def test_parts_of_stages_and_shards(tmp_path: Path) -> None:
    """The first stage has the attention of a block and its sum, the second one the MLP and its sum."""
    graph = split_graphs.save(split_graphs.attention(), tmp_path / "whole")
    costs = count_costs(graph, 2)
    cut = next(place for place in find_cuts(costs)[:-1] if costs.nodes[place].reads == ("r",))
    (tmp_path / "parts").mkdir()
    write_parts(graph, (cut,), 2, tmp_path / "parts")
    parts = read_parts(tmp_path / "parts")
    assert (parts.shards, parts.stages) == (2, 2)
    assert [part.stage for part in parts.parts] == [0, 0, 1, 1]
    assert [part.reduced for part in parts.parts] == [{"o0_partial": "o0"}, {}, {"e0_partial": "e0"}, {}]
    assert [number for number, _ in parts.of_stage(1)] == [2, 3]
    assert parts.parts[1].outputs == ("r",)
    for number in range(4):
        for shard in range(2):
            onnx.checker.check_model(onnx.load(graph_of(tmp_path / "parts", number, shard)))


def test_damaged_folder(tmp_path: Path) -> None:
    with pytest.raises(CacheError, match="cannot read the parts of a graph"):
        read_parts(tmp_path)
    (tmp_path / "parts.json").write_text('{"parts": [{"stage": "first"}]}')
    with pytest.raises(CacheError, match="cannot read the parts of a graph"):
        read_parts(tmp_path)


def test_costs_of_shards_use_sample_shapes(tmp_path: Path) -> None:
    graph = split_graphs.save(split_graphs.decoder(), tmp_path)
    shapes = {"x": (1, 16, split_graphs.WIDTH)}
    whole, shard = count_costs(graph, 1, shapes), count_costs(graph, 2, shapes)
    assert whole.flops > 10 * count_costs(graph, 1).flops
    assert shard.flops * 2 == whole.flops
    sums = [node for node in shard.nodes if node.op_type == "AllReduce"]
    assert [sum(node.writes.values()) for node in sums] == [16 * split_graphs.WIDTH * 4]


def test_external_weights_are_counted_but_not_read(tmp_path: Path) -> None:
    """A model of many gigabytes is planned by every instance."""
    graph = split_graphs.save(split_graphs.mlp(), tmp_path / "inside")
    apart = tmp_path / "apart" / "model.onnx"
    apart.parent.mkdir()
    onnx_ir.save(split_graphs.mlp(), apart, external_data="weights.bin", size_threshold_bytes=2048)
    expected = count_costs(graph, 1)
    (apart.parent / "weights.bin").unlink()
    assert count_costs(apart, 1) == expected


X = draw(4, 3, 16, 16, seed=1)


class Counting(OnnxRuntimeEngine):
    """Engine that records what it compiles."""

    def __init__(self) -> None:
        self.compiled: list[str] = []

    def compile(self, graph_path: Path, config: SessionConfig, folder: Path) -> None:
        self.compiled.append(graph_path.name)
        super().compile(graph_path, config, folder)


class Setting:
    """A graph, its split, and a lasting cache."""

    def __init__(self, folder: Path) -> None:
        self.graph = split_graphs.save(split_graphs.convolutions(), folder / "whole")
        self.config = spread(self.graph, folder / "by hand", 2)
        self.by_hand = PreparedParts(folder=folder / "by hand")
        self.cache = folder / "cache"

    def start(self, *, lasting: bool = True, config: SessionConfig | None = None) -> list[str]:
        """Build and run the session as a start does; return what was compiled."""
        engine, config = Counting(), config or self.config
        with ArtifactCache(self.cache, lasting=lasting) as cache:
            prepared = prepare_parts(self.artifacts(cache), engine, config)
            self.found = self.run_split(engine, prepared, config)
        return engine.compiled

    def run_split(self, engine: OnnxRuntimeEngine, prepared: PreparedParts, config: SessionConfig) -> AnyArray:
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


def test_second_start_compiles_and_cuts_nothing(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    assert setting.start() == ["part-0-shard-0.onnx", "part-1-shard-0.onnx"]
    first = setting.found
    monkeypatch.setattr(part_artifacts, "write_parts", None)
    assert setting.start() == []
    np.testing.assert_array_equal(setting.found, first)


def test_only_a_damaged_part_is_built_again(setting: Setting, caplog: pytest.LogCaptureFixture) -> None:
    setting.start()
    first, (entry, _) = setting.found, setting.compiled_entries()
    damaged = next(path for path in entry.iterdir() if path.name != "entry.json" and path.suffix != ".json")
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 1
    damaged.write_bytes(content)
    with caplog.at_level(logging.WARNING):
        assert len(setting.start()) == 1
    assert f"{damaged.name} is damaged" in caplog.text
    np.testing.assert_array_equal(setting.found, first)
    assert setting.start() == []


def test_entry_without_parts_json_is_built_again(setting: Setting) -> None:
    setting.start()
    for entry in setting.compiled_entries():
        (entry / "parts.json").unlink()
    assert len(setting.start()) == 2


def test_content_and_cuts_are_part_of_the_key(setting: Setting) -> None:
    setting.start()
    three = spread(setting.graph, setting.by_hand.folder, 3)
    assert len(setting.start(config=three)) == 3
    (setting.graph.parent / "weights.bin").write_bytes(b"beside the graph")
    assert len(setting.start()) == 2
    assert len(setting.compiled_entries()) == 7


def test_parts_of_a_replaced_graph_are_not_cached(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    write = part_artifacts.write_parts

    def slow(*arguments: Any) -> None:
        write(*arguments)
        setting.graph.write_bytes(setting.graph.read_bytes() + b"")

    monkeypatch.setattr(part_artifacts, "write_parts", slow)
    with pytest.raises(LoweringError, match="was replaced"):
        setting.start()
    assert not list(setting.cache.glob("entries/*"))


class TestWithoutCompiledParts:
    def test_temporary_cache(self, setting: Setting) -> None:
        assert setting.start(lasting=False) == []
        assert not setting.compiled_entries()

    def test_engine_without_cache_identity(self, setting: Setting) -> None:
        off = replace(setting.config, tuning=replace(setting.config.tuning, graph_level="off"))
        with ArtifactCache(setting.cache) as cache:
            prepared = prepare_parts(setting.artifacts(cache), OnnxRuntimeEngine(), off)
            assert not prepared.compiled
            assert graph_of(prepared.folder, 1, 0).is_file()
            assert read_parts(prepared.folder).stages == 2


def test_part_is_configured_for_its_place(setting: Setting) -> None:
    place = Place(setting.config.device, (4, 5))
    own = config_at(replace(setting.config, threads=8), place)
    assert (own.threads, own.parallel, own.places, own.cuts) == (2, None, (), ())
    assert config_at(replace(setting.config, threads=8), Place(setting.config.device)).threads == 8


@pytest.mark.parametrize("own", ["", "0"])
def test_threads_of_shards_stop_spinning_unless_configured(setting: Setting, own: str) -> None:
    stop = "session.force_spinning_stop"
    tuning = replace(setting.config.tuning, config_entries={stop: own} if own else {})
    config = replace(setting.config, threads=8, parallel=Parallelism(tensor=2), tuning=tuning)
    assert config_at(config, Place(config.device, (0, 1, 2, 3))).tuning.config_entries == {stop: own or "1"}
