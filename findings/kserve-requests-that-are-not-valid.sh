#!/usr/bin/env bash
# kserve 0.21.0: InferRequest.to_rest writes `"data": null` beside a binary tensor of no elements, and null for NaN.
#
# A tensor with `binary_data_size` 0 has its data in the (empty) binary part, and no `data`; Triton refuses a request with
# both. NaN and infinity, which JSON does not have, become null by orjson without an error; Triton refuses these, too.
# Send such numbers as bytes, which is the default of set_data_from_numpy; send no empty tensors by REST, or as values.
# The same tensors pass by InferenceGRPCClient.
#
# Installs into a temporary folder; ends with failure if a request is written otherwise.
#
# Seen:
#   {"name": "x", "shape": [1, 0], "datatype": "FP32", "parameters": {"binary_data_size": 0}, "data": null}
#   "data":[null,null,1.0]
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check kserve==0.21.0
"$folder/venv/bin/python" - <<'P'
import json

import numpy as np
import orjson
from kserve import InferInput, InferRequest


def request(array, *, binary):
    tensor = InferInput("x", list(array.shape), "FP32")
    tensor.set_data_from_numpy(array, binary_data=binary)
    return InferRequest("any", [tensor]).to_rest()[0]


(empty,) = request(np.zeros((1, 0), np.float32), binary=True)["inputs"]
print(json.dumps(empty))
# As InferenceRESTClient.infer sends it.
sent = orjson.dumps(request(np.array([[np.nan, np.inf, 1]], np.float32), binary=False)).decode()
data = sent[sent.index('"data"') :].split("}")[0]
print(data)
both = "data" in empty and empty["parameters"] == {"binary_data_size": 0}
raise SystemExit(not both or data != '"data":[null,null,1.0]')
P
