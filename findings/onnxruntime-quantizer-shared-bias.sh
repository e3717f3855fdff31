#!/usr/bin/env bash
# onnxruntime 1.32.0 (onnx 1.23.2): quantize_static in QDQ format can replace a computed value by a bias, in silence.
#
# Two Gemm nodes read one bias `b6`. The quantizer copies the bias for the second node, and appends to its name the next
# number that no *initializer* has: `b60`. It does not look at the names of computed values. Where the graph computes a
# value `b60`, both become the same name in the quantized graph, which passes shape inference and loads when a bias
# broadcasts there; the sum below then reads the bias instead of the value. Exporters number values (`val_6`, `val_60`)
# and store equal biases once, so that such graphs come about by themselves.
#
# Seen, beside the fp32 graph over 64 rows:
#   value named b60: largest difference 1.110
#   value named relu: largest difference 0.019
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check onnxruntime==1.32.0 onnx==1.23.2 sympy numpy==2.2.6
cd "$folder"
"$folder/venv/bin/python" - <<'P'
import logging

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper
from onnxruntime.quantization import CalibrationDataReader, QuantFormat, quantize_static

logging.disable(logging.WARNING)
ROWS = np.random.default_rng(0).uniform(-1, 1, (64, 8)).astype(np.float32)


class Reader(CalibrationDataReader):
    def __init__(self):
        self.left = iter([{"x": ROWS}])

    def get_next(self):
        return next(self.left, None)


def save(value):
    generator = np.random.default_rng(1)
    square = lambda name: numpy_helper.from_array(generator.uniform(-0.5, 0.5, (8, 8)).astype(np.float32), name)
    nodes = [
        helper.make_node("Gemm", ["x", "w1", "b6"], ["first"], name="one"),
        helper.make_node("Relu", ["first"], [value], name="two"),
        helper.make_node("Gemm", ["first", "w2", "b6"], ["second"], name="three"),
        helper.make_node("Add", ["second", value], ["y"], name="four"),
    ]
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", 8]) for name in "xy"]
    weights = [square("w1"), square("w2"), numpy_helper.from_array(np.full(8, 0.1, np.float32), "b6")]
    graph = helper.make_graph(nodes, "g", ends[:1], ends[1:], weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.checker.check_model(model, full_check=True)
    onnx.save(model, f"{value}.onnx")


def run(file):
    return onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"]).run(None, {"x": ROWS})[0]


error = {}
for value in ("b60", "relu"):
    save(value)
    quantize_static(f"{value}.onnx", f"{value}.int8.onnx", Reader(), quant_format=QuantFormat.QDQ)
    error[value] = float(np.abs(run(f"{value}.int8.onnx") - run(f"{value}.onnx")).max())
    print(f"value named {value}: largest difference {error[value]:.3f}")
assert error["b60"] > 1 and error["relu"] < 0.1, "changed: read the text above again"
P
