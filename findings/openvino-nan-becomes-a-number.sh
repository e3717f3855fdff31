#!/usr/bin/env bash
# openvino 2026.4.1 (CPU): Relu, Exp, Greater, Softmax and HardSigmoid turn NaN into numbers.
#
# ONNX's reference and onnxruntime return NaN for NaN, and false for each comparison with it. OpenVINO computes Relu(NaN)
# = 0, Exp(NaN) = inf, HardSigmoid(NaN) = 1 and NaN > 0 = true; Softmax is NaN in the place of the NaN alone, and 0
# beside it. A network with a Relu therefore answers an image of NaN with confident probabilities.
#
# Seen (on a processor with AVX512):
#   Relu of [nan, 1]: onnxruntime [nan, 1.0], openvino [0.0, 1.0]
#   Exp of [nan, 0]: onnxruntime [nan, 1.0], openvino [inf, 1.0]
#   HardSigmoid of [nan, 0]: onnxruntime [nan, 0.5], openvino [1.0, 0.5]
#   [nan, 1] > 0: onnxruntime [False, True], openvino [True, True]
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


def both(kind, out, value, *more):
    zero = [numpy_helper.from_array(np.float32(0), "zero")]
    nodes = [helper.make_node(kind, ["x", *more], ["y"])]
    x, y = (helper.make_tensor_value_info(name, dtype, [1, 2]) for name, dtype in (("x", T.FLOAT), ("y", out)))
    graph = helper.make_graph(nodes, "g", [x], [y], zero if more else [])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9).SerializeToString()
    array = np.array([[np.nan, value]], np.float32)
    core = openvino.Core()
    compiled = core.compile_model(core.read_model(model), "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    wanted = onnxruntime.InferenceSession(model).run(None, {"x": array})[0]
    return wanted[0].tolist(), compiled([array])[0][0].tolist()


found = {
    "Relu of [nan, 1]": both("Relu", T.FLOAT, 1),
    "Exp of [nan, 0]": both("Exp", T.FLOAT, 0),
    "HardSigmoid of [nan, 0]": both("HardSigmoid", T.FLOAT, 0),
    "[nan, 1] > 0": both("Greater", T.BOOL, 1, "zero"),
}
for name, (wanted, got) in found.items():
    print(f"{name}: onnxruntime {wanted}, openvino {got}")
if any(str(wanted) == str(got) for wanted, got in found.values()):
    raise SystemExit("changed: read the text above again")
P
