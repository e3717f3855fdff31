#!/usr/bin/env bash
# ONNX Runtime 1.32.0 on x86: a valid int8 graph of operator set 21 or newer does not load, because of its own rewrites.
#
# Behind a DequantizeLinear of int8 stands a node that only moves values (Reshape, Transpose, Unsqueeze). ONNX Runtime
# moves the pair of QuantizeLinear and DequantizeLinear behind it; from operator set 21 on it gives the new node
# `output_dtype` int8. Then it makes int8 activations uint8, with a uint8 zero point, and forgets `output_dtype`. The graph
# loads with operator set 19, without rewrites, and with `session.qdqisint8allowed` 1, which leaves int8 as it is.
#
# Needs Python 3.11 or newer and PyPI; installs in a temporary folder only.
#
# Seen:
#   operator set 19: loaded
#   operator set 21: Node (r_q) Op (QuantizeLinear) [TypeInferenceError] output_dtype INT8 does not match y_zero_point type UINT8.
#   operator set 21, int8 allowed: loaded
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install -q --disable-pip-version-check onnxruntime==1.32.0 onnx==1.23.2 numpy
ORT_DISABLE_TELEMETRY=1 venv/bin/python - <<'P'
import numpy as np
import onnx
import onnxruntime

TEXT = """<ir_version: 10, opset_import: ["": %d]> g (float[n,2,3] x) => (float[n,4] y) {
    q = QuantizeLinear(x, s, z) d = DequantizeLinear(q, s, z) r = Reshape(d, shape)
    v = DequantizeLinear(w, s, z) y = MatMul(r, v)
}"""
WEIGHTS = {
    "s": np.float32(0.02),
    "z": np.int8(0),
    "shape": np.array([-1, 6]),
    "w": np.arange(-12, 12, dtype=np.int8).reshape(6, 4),
}


def load(opset, *, int8=False):
    model = onnx.parser.parse_model(TEXT % opset)
    model.graph.initializer.extend(onnx.numpy_helper.from_array(np.asarray(a), name) for name, a in WEIGHTS.items())
    onnx.checker.check_model(model, full_check=True)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    if int8:
        options.add_session_config_entry("session.qdqisint8allowed", "1")
    try:
        onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    except Exception as error:
        return str(error).split(" : FAIL : ")[-1]
    return "loaded"


found = load(19), load(21), load(21, int8=True)
for case, result in zip(("19", "21", "21, int8 allowed"), found, strict=True):
    print(f"operator set {case}: {result}")
if not (found[0] == found[2] == "loaded" and "output_dtype INT8 does not match" in found[1]):
    raise SystemExit("changed: read the text above again")
P
