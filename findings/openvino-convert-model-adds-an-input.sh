#!/usr/bin/env bash
# openvino 2026.4.1: `convert_model` adds an input to a graph that has an input among its outputs.
#
# `Core.read_model` reads the same ONNX file with the one input that it has. `convert_model` returns a model with a second
# one, `x_1`, which both outputs are computed from: `x` has no effect any more.
#
# Seen:
#   read_model: inputs x; outputs x, y
#   convert_model: inputs x, x_1; outputs x_1, y
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check openvino==2026.4.1 onnx==1.23.2 numpy==2.2.6
cd "$folder"
OPENVINO_TELEMETRY=0 "$folder/venv/bin/python" - <<'P'
import onnx
import openvino
from onnx import TensorProto, helper

x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n"]) for name in "xy")
graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "g", [x], [y, x])
model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
onnx.checker.check_model(model, full_check=True)
onnx.save(model, "model.onnx")
inputs = {}
for name, read in (("read_model", openvino.Core().read_model), ("convert_model", openvino.convert_model)):
    found = read("model.onnx")
    inputs[name], outputs = (sorted(port.get_any_name() for port in ports) for ports in (found.inputs, found.outputs))
    print(f"{name}: inputs {', '.join(inputs[name])}; outputs {', '.join(outputs)}")
assert inputs == {"read_model": ["x"], "convert_model": ["x", "x_1"]}, "changed: read the text above again"
P
