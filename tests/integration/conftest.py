"""Model stores with small graphs, each made for one purpose."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper


@pytest.fixture
def slow_store(tmp_path: Path) -> Path:
    """A store with the model `slow`: `ROUNDS` matrix products of 256x256, as many as the request asks for."""
    weight = np.eye(256, dtype=np.float32)
    body = helper.make_graph(
        [
            helper.make_node("MatMul", ["state_in", "weight"], ["state_out"]),
            helper.make_node("Identity", ["go_in"], ["go_out"]),
        ],
        "body",
        [
            helper.make_tensor_value_info("round", TensorProto.INT64, []),
            helper.make_tensor_value_info("go_in", TensorProto.BOOL, []),
            helper.make_tensor_value_info("state_in", TensorProto.FLOAT, [256, 256]),
        ],
        [
            helper.make_tensor_value_info("go_out", TensorProto.BOOL, []),
            helper.make_tensor_value_info("state_out", TensorProto.FLOAT, [256, 256]),
        ],
    )
    graph = helper.make_graph(
        [
            helper.make_node("Squeeze", ["ROUNDS"], ["rounds"]),
            helper.make_node("Loop", ["rounds", "", "weight"], ["state"], body=body),
            helper.make_node("ReduceSum", ["state"], ["sum"], keepdims=0),
            helper.make_node("Unsqueeze", ["sum", "axis"], ["SUM"]),
        ],
        "slow",
        [helper.make_tensor_value_info("ROUNDS", TensorProto.INT64, [1])],
        [helper.make_tensor_value_info("SUM", TensorProto.FLOAT, [1])],
        [
            numpy_helper.from_array(weight, "weight"),
            numpy_helper.from_array(np.array([0], np.int64), "axis"),
        ],
    )
    config = """
        backend: "graphkiln"
        input { name: "ROUNDS" data_type: TYPE_INT64 dims: [1] }
        output { name: "SUM" data_type: TYPE_FP32 dims: [1] }
    """
    return write_model(tmp_path / "slow store", "slow", graph, config)


@pytest.fixture
def lookup_store(tmp_path: Path) -> Path:
    """A store with the model `lookup`: batches of indices into ten numbers; an index of 10 fails while it runs."""
    graph = helper.make_graph(
        [helper.make_node("Gather", ["table", "INDEX"], ["VALUE"])],
        "lookup",
        [helper.make_tensor_value_info("INDEX", TensorProto.INT64, ["batch", "length"])],
        [helper.make_tensor_value_info("VALUE", TensorProto.FLOAT, ["batch", "length"])],
        [numpy_helper.from_array(np.arange(10, dtype=np.float32) * 10, "table")],
    )
    config = """
        backend: "graphkiln"
        max_batch_size: 8
        input { name: "INDEX" data_type: TYPE_INT64 dims: [-1] }
        output { name: "VALUE" data_type: TYPE_FP32 dims: [-1] }
        dynamic_batching { max_queue_delay_microseconds: 200000 preferred_batch_size: [8] }
    """
    return write_model(tmp_path / "store", "lookup", graph, config)


def write_model(store: Path, name: str, graph: onnx.GraphProto, config: str) -> Path:
    """Writes a graph as version 1 of a model; returns the store."""
    folder = store / name / "1"
    folder.mkdir(parents=True)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    onnx.checker.check_model(model)
    onnx.save(model, folder / "model.onnx")
    (store / name / "config.pbtxt").write_text(config)
    return store
