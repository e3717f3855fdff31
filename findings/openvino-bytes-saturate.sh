#!/usr/bin/env bash
# openvino 2026.4.1 (CPU): integers of 8 bits saturate, and integers of 16 bits do not wrap, where ONNX wraps both.
#
# ONNX's Add, Sub, Mul and BitShift of UINT8 and INT8 wrap around (onnxruntime computes 200 + 200 = 144). OpenVINO
# computes 255, and rounds the quotient 7 / 2 to 4. Casts of INT32 to INT16, UINT16 or UINT32 inside of a graph keep all
# 32 bits: the wrapped value appears only if the narrow tensor is itself an output.
#
# Seen:
#   200 + 200 of UINT8: onnxruntime 144, openvino 255
#   7 / 2 of UINT8: onnxruntime 3, openvino 4
#   100 + 100 of INT8: onnxruntime -56, openvino 127
#   40000 to INT16 to FLOAT: onnxruntime -25536.0, openvino 40000.0
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


def both(nodes, dtype, out, *arrays):
    ends = [helper.make_tensor_value_info(name, dtype, ["n", 64]) for name in "xz"[: len(arrays)]]
    graph = helper.make_graph(nodes, "g", ends, [helper.make_tensor_value_info("y", out, ["n", 64])])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9).SerializeToString()
    feeds = [np.full((1, 64), each, helper.tensor_dtype_to_np_dtype(dtype)) for each in arrays]
    core = openvino.Core()
    compiled = core.compile_model(core.read_model(model), "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    wanted = onnxruntime.InferenceSession(model).run(None, dict(zip("xz", feeds)))[0]
    return wanted[0, 0].item(), compiled(feeds)[0][0, 0].item()


def of_two(kind):
    return [helper.make_node(kind, ["x", "z"], ["y"])]


cast = [helper.make_node("Cast", ["x"], ["c"], to=T.INT16), helper.make_node("Cast", ["c"], ["y"], to=T.FLOAT)]
found = {
    "200 + 200 of UINT8": both(of_two("Add"), T.UINT8, T.UINT8, 200, 200),
    "7 / 2 of UINT8": both(of_two("Div"), T.UINT8, T.UINT8, 7, 2),
    "100 + 100 of INT8": both(of_two("Add"), T.INT8, T.INT8, 100, 100),
    "40000 to INT16 to FLOAT": both(cast, T.INT32, T.FLOAT, 40000),
}
for name, (wanted, got) in found.items():
    print(f"{name}: onnxruntime {wanted}, openvino {got}")
if list(found.values()) != [(144, 255), (3, 4), (-56, 127), (-25536.0, 40000.0)]:
    raise SystemExit("changed: read the text above again")
P
