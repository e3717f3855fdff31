"""Graphs with custom operators, whose library is named in config.pbtxt, as for Triton's C++ backend."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import onnx
import onnxruntime_extensions
import pytest
import zoo
from drop_in import drop_in
from onnx import TensorProto, helper
from running import Serving

from graphkiln_backend.graph.errors import LoweringError
from graphkiln_client import Client

LIBRARY = onnxruntime_extensions.get_library_path()


def upper() -> onnx.ModelProto:
    """Graph that converts text to capitals, with an operator of onnxruntime-extensions."""
    nodes = [helper.make_node("StringUpper", ["x"], ["y"], domain="ai.onnx.contrib")]
    values = [zoo.value(name, ("n", 2), TensorProto.STRING) for name in "xy"]
    model = zoo.model(nodes, values[:1], values[1:])
    model.opset_import.add(domain="ai.onnx.contrib", version=1)
    return model


def naming(library: str) -> str:
    return f'model_operations {{ op_library_filename: "{library}" }}'


def test_library_is_loaded(tmp_path: Path) -> None:
    with drop_in(tmp_path, upper(), naming(LIBRARY)) as served:
        (outputs,) = served.ask({"x": np.array([[b"a", b"bc"]], np.object_)})
        assert outputs["y"].tolist() == [["A", "BC"]]


def test_missing_library_is_an_error_with_a_hint(tmp_path: Path) -> None:
    with pytest.raises(LoweringError, match="op_library_filename"), drop_in(tmp_path, upper()):
        pass


def test_other_engines_are_refused(tmp_path: Path) -> None:
    config = naming(LIBRARY) + ' parameters { key: "engine" value { string_value: "openvino" } }'
    with pytest.raises(LoweringError, match="built for ONNX Runtime"), drop_in(tmp_path, upper(), config):
        pass


@pytest.mark.server
@pytest.mark.slow
def test_two_instances_on_the_server(tmp_path: Path) -> None:
    """The instances share one optimized copy; the library is in the model's folder."""
    zoo.add(tmp_path / "store", "upper", upper(), naming("lib.so") + " instance_group { count: 2 kind: KIND_CPU }")
    shutil.copy(LIBRARY, tmp_path / "store" / "upper" / "lib.so")
    with Serving(tmp_path, "--model-store", tmp_path / "store") as server:
        server.wait_ready()
        with Client(server.url) as client:
            answer = client.model("upper").infer({"x": np.array([[b"a", b"bc"]], np.object_)})
            assert answer["y"].tolist() == [[b"A", b"BC"]]
