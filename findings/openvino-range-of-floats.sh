#!/usr/bin/env bash
# openvino 2026.4.1 (CPU): a Range of floats is one element too short, and a Range against its direction is not empty.
#
# ONNX defines the number of elements as max(ceil((limit - start) / delta), 0). OpenVINO divides in FP32, where 13 / 0.65
# is exactly 20 (in FP64, of the same FP32 numbers, it is 20.0000006, so that ONNX has 21 elements). For a limit that
# lies on the other side of the start, it counts as many elements as if the sign of delta were the other one, of integers,
# too. Constant ranges are right: they are folded by other code.
#
# Seen:
#   1.3 to 14.3 by 0.65: onnxruntime 21 elements, openvino 20
#   5 to 2 by 1 (INT64): onnxruntime [], openvino [5, 6, 7]
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


def both(dtype, *values):
    ends = [helper.make_tensor_value_info(name, dtype, []) for name in "abc"]
    node = helper.make_node("Range", ["a", "b", "c"], ["y"])
    graph = helper.make_graph([node], "g", ends, [helper.make_tensor_value_info("y", dtype, ["m"])])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9).SerializeToString()
    feeds = [np.array(each, helper.tensor_dtype_to_np_dtype(dtype)) for each in values]
    core = openvino.Core()
    compiled = core.compile_model(core.read_model(model), "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    wanted = onnxruntime.InferenceSession(model).run(None, dict(zip("abc", feeds)))[0]
    return wanted.tolist(), compiled(feeds)[0].tolist()


wanted, got = both(T.FLOAT, 1.3, 14.3, 0.65)
print(f"1.3 to 14.3 by 0.65: onnxruntime {len(wanted)} elements, openvino {len(got)}")
empty, counted = both(T.INT64, 5, 2, 1)
print(f"5 to 2 by 1 (INT64): onnxruntime {empty}, openvino {counted}")
if (len(wanted), len(got), empty, counted) != (21, 20, [], [5, 6, 7]):
    raise SystemExit("changed: read the text above again")
P
