#!/usr/bin/env bash
# onnxruntime 1.32.0: an output that is an input of the graph is a copy, a view of the caller's array, or not written.
#
# A graph may list an input among its outputs. `run` returns a copy. `run_with_ort_values` returns the OrtValue of the
# input, which for an array on the CPU is memory of the caller: the answer changes once the caller uses the array again.
# `run_with_iobinding` leaves a buffer that is bound for the output (`bind_ortvalue_output`) as it was, without an error.
#
# Seen, for 1, 2, 3 sent, and 7, 7, 7 written into the sent array afterwards:
#   run: [1.0, 2.0, 3.0]
#   run_with_ort_values: [7.0, 7.0, 7.0]
#   run_with_iobinding, buffer of -1: [-1.0, -1.0, -1.0]
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check onnxruntime==1.32.0 onnx==1.23.2 numpy==2.2.6
"$folder/venv/bin/python" - <<'P'
import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper
from onnxruntime import OrtValue

x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n"]) for name in "xy")
graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "g", [x], [y, x])
model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
onnx.checker.check_model(model, full_check=True)
session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
found = {}

sent = np.array([1, 2, 3], np.float32)
answer = session.run(["x"], {"x": sent})[0]
sent[:] = 7
found["run"] = answer

sent = np.array([1, 2, 3], np.float32)
answer = session.run_with_ort_values(["x"], {"x": OrtValue.ortvalue_from_numpy(sent)})[0].numpy()
sent[:] = 7
found["run_with_ort_values"] = answer

binding = session.io_binding()
binding.bind_cpu_input("x", np.array([1, 2, 3], np.float32))
buffer = OrtValue.ortvalue_from_numpy(np.full(3, -1, np.float32))
binding.bind_ortvalue_output("x", buffer)
binding.bind_output("y")
session.run_with_iobinding(binding)
found["run_with_iobinding, buffer of -1"] = buffer.numpy()

for name, answer in found.items():
    print(f"{name}: {answer.tolist()}")
assert [int(answer[0]) for answer in found.values()] == [1, 7, -1], "changed: read the text above again"
P
