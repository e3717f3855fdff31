#!/usr/bin/env bash
# openvino 2026.4.1 (CPU): Cast to FLOAT8 ignores `saturate`, and Cast to INT4 inside of a graph does nothing.
#
# ONNX's Cast to an 8-bit float saturates by default (`saturate=1`): 1000 becomes 448 in FLOAT8E4M3FN. OpenVINO computes
# NaN. A Cast to INT4 and back, which keeps 4 bits, is left out but for a rounding: 100 stays 100.
#
# Seen:
#   1000 to FLOAT8E4M3FN and back: onnxruntime 448.0, openvino nan
#   100 to INT4 and back: onnxruntime 4.0, openvino 100.0
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check openvino==2026.4.1 onnxruntime==1.32.0 onnx==1.23.2 numpy==2.2.6
cd "$folder"
"$folder/venv/bin/python" - <<'P'
import numpy as np
import onnxruntime
import openvino
from onnx import TensorProto as T
from onnx import helper


def both(to, value):
    nodes = [helper.make_node("Cast", ["x"], ["c"], to=to), helper.make_node("Cast", ["c"], ["y"], to=T.FLOAT)]
    x, y = (helper.make_tensor_value_info(name, T.FLOAT, ["n", 2]) for name in "xy")
    graph = helper.make_graph(nodes, "g", [x], [y])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10).SerializeToString()
    array = np.array([[value, 1]], np.float32)
    core = openvino.Core()
    compiled = core.compile_model(core.read_model(model), "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    wanted = onnxruntime.InferenceSession(model).run(None, {"x": array})[0]
    return wanted[0, 0].item(), compiled([array])[0][0, 0].item()


eight, four = both(T.FLOAT8E4M3FN, 1000), both(T.INT4, 100)
print("1000 to FLOAT8E4M3FN and back: onnxruntime {}, openvino {}".format(*eight))
print("100 to INT4 and back: onnxruntime {}, openvino {}".format(*four))
if eight[0] == eight[1] or four[0] == four[1]:
    raise SystemExit("changed: read the text above again")
P
