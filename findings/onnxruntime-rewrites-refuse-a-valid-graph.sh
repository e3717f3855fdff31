#!/usr/bin/env bash
# onnxruntime 1.32.0: its own graph optimizations make a valid graph invalid, and the session fails to load.
#
# y = (1 / 1) * Cast(x), where the Cast from float to float does nothing. At the levels basic, extended and all the load
# fails, because a node still reads the output of the Cast that was dropped. With ORT_DISABLE_ALL the graph runs.
#
# Seen:
#   ORT_ENABLE_ALL: [ONNXRuntimeError] : 2 : INVALID_ARGUMENT : Invalid model. Node input 'same' is not a graph input, initializer, or output of a previous node.
#   ORT_DISABLE_ALL: [1.0, 2.0, 3.0]
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check onnxruntime==1.32.0 onnx==1.23.2 numpy==2.2.6
"$folder/venv/bin/python" - <<'P'
import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

nodes = [
    helper.make_node("Cast", ["x"], ["same"], to=TensorProto.FLOAT),
    helper.make_node("Div", ["one", "other"], ["ratio"]),
    helper.make_node("Mul", ["ratio", "same"], ["y"]),
]
x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n"]) for name in "xy")
ones = [numpy_helper.from_array(np.float32(1), name) for name in ("one", "other")]
model = helper.make_model(
    helper.make_graph(nodes, "g", [x], [y], ones), opset_imports=[helper.make_opsetid("", 17)], ir_version=8
)
onnx.checker.check_model(model, full_check=True)
found = {}
for level in ("ORT_ENABLE_ALL", "ORT_DISABLE_ALL"):
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, level)
    try:
        session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        found[level] = session.run(None, {"x": np.array([1, 2, 3], np.float32)})[0].tolist()
    except Exception as error:
        found[level] = str(error).strip()
    print(f"{level}: {found[level]}")
assert "Invalid model" in found["ORT_ENABLE_ALL"], "changed: read the text above again"
assert found["ORT_DISABLE_ALL"] == [1, 2, 3], "changed: read the text above again"
P
