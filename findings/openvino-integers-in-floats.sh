#!/usr/bin/env bash
# openvino 2026.4.1 (CPU): INT32 passes through FP32 in ReverseSequence, which only moves values.
#
# OpenVINO converts the values to FP32 and back: 2^24 + 1 becomes 2^24. (So does Trilu in some shapes.) Concat, Gather,
# Where and Max of the same numbers are exact.
#
# Seen:
#   [16777217, 2147483647] reversed: onnxruntime [2147483647, 16777217], openvino [2147483520, 16777216]
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
from onnx import helper, numpy_helper


def both(node, *constants):
    x, y = (helper.make_tensor_value_info(name, T.INT32, [1, 2]) for name in "xy")
    graph = helper.make_graph([node], "g", [x], [y], constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9).SerializeToString()
    array = np.array([[2**24 + 1, 2**31 - 1]], np.int32)
    core = openvino.Core()
    compiled = core.compile_model(core.read_model(model), "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    wanted = onnxruntime.InferenceSession(model).run(None, {"x": array})[0]
    return wanted[0].tolist(), compiled([array])[0][0].tolist()


lengths = numpy_helper.from_array(np.array([2], np.int64), "lengths")
node = helper.make_node("ReverseSequence", ["x", "lengths"], ["y"], batch_axis=0, time_axis=1)
wanted, got = both(node, lengths)
print(f"[16777217, 2147483647] reversed: onnxruntime {wanted}, openvino {got}")
if wanted == got:
    raise SystemExit("changed: read the text above again")
P
