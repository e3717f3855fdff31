#!/usr/bin/env bash
# skl2onnx 1.20.0, scikit-learn 1.9.1: a tree that was fitted with missing values answers NaN otherwise.
#
# scikit-learn's trees and forests learn for each split whether NaN goes to the left (`missing_go_to_left`). The export
# writes `nodes_missing_value_tracks_true` as zeros, so that NaN goes to the right at every split; nothing is reported.
# The attribute itself works in ONNX Runtime: skl2onnx sets it for HistGradientBoosting.
#
# Installs into a temporary folder; ends with failure if the graph answers as the estimator.
#
# Seen:
#   scikit-learn [1.0, 0.0], the graph [0.0, 0.0]
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check scikit-learn==1.9.1 skl2onnx==1.20.0 onnxruntime==1.32.0 onnx==1.23.2
"$folder/venv/bin/python" - <<'P'
import numpy as np
import onnxruntime
import skl2onnx
from sklearn.tree import DecisionTreeRegressor

x = np.array([[np.nan], [np.nan], [1.0], [2.0], [3.0], [4.0]], np.float32)
y = np.array([1.0, 1.0, 1.0, 1.0, 0.0, 0.0])
tree = DecisionTreeRegressor().fit(x, y)
graph = skl2onnx.to_onnx(tree, x, target_opset={"": 18, "ai.onnx.ml": 3})
session = onnxruntime.InferenceSession(graph.SerializeToString(), providers=["CPUExecutionProvider"])
rows = np.array([[np.nan], [4.0]], np.float32)
right, found = tree.predict(rows).tolist(), session.run(None, {"X": rows})[0].ravel().tolist()
print(f"scikit-learn {right}, the graph {found}")
raise SystemExit(right == found)
P
