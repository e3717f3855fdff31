"""The graphs of all parts, in a folder."""

from __future__ import annotations

from pathlib import Path

import onnx
import onnx_ir
import pytest
import split_graphs

from graphkiln_backend.graph.errors import CacheError
from graphkiln_backend.lowering.parallel.parts import count_costs, graph_of, read_parts, write_parts
from graphkiln_backend.lowering.parallel.stages import find_cuts


def test_stages_and_shards(tmp_path: Path) -> None:
    """The sum behind the attention of a block lies in the first stage, that of its MLP in the second."""
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


def test_a_folder_that_is_damaged(tmp_path: Path) -> None:
    with pytest.raises(CacheError, match="cannot read the parts of a graph"):
        read_parts(tmp_path)
    (tmp_path / "parts.json").write_text('{"parts": [{"stage": "first"}]}')
    with pytest.raises(CacheError, match="cannot read the parts of a graph"):
        read_parts(tmp_path)


def test_sizes_of_samples_are_those_of_shards_too(tmp_path: Path) -> None:
    graph = split_graphs.save(split_graphs.decoder(), tmp_path)
    shapes = {"x": (1, 16, split_graphs.WIDTH)}
    whole, shard = count_costs(graph, 1, shapes), count_costs(graph, 2, shapes)
    assert whole.flops > 10 * count_costs(graph, 1).flops
    assert shard.flops * 2 == whole.flops
    sums = [node for node in shard.nodes if node.op_type == "AllReduce"]
    assert [sum(node.writes.values()) for node in sums] == [16 * split_graphs.WIDTH * 4]


def test_weights_in_a_file_of_their_own_are_counted_and_not_read(tmp_path: Path) -> None:
    """A model of many gigabytes is planned by every instance."""
    graph = split_graphs.save(split_graphs.mlp(), tmp_path / "inside")
    apart = tmp_path / "apart" / "model.onnx"
    apart.parent.mkdir()
    onnx_ir.save(split_graphs.mlp(), apart, external_data="weights.bin", size_threshold_bytes=2048)
    expected = count_costs(graph, 1)
    (apart.parent / "weights.bin").unlink()
    assert count_costs(apart, 1) == expected
