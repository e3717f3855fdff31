"""An existing user of tritonclient: digits over HTTP or gRPC, labels by the classification extension.

Usage: plain_tritonclient.py http|grpc HOST:PORT
"""

import importlib
import sys

import numpy as np

protocol, address = sys.argv[1:]
triton = importlib.import_module(f"tritonclient.{protocol}")
with triton.InferenceServerClient(address) as client:
    assert client.is_server_ready()
    assert client.is_model_ready("digits")
    pixels = np.zeros((2, 1, 32, 32), np.float32)
    tensor = triton.InferInput("INPUT_0", pixels.shape, "FP32")
    tensor.set_data_from_numpy(pixels)
    scores = client.infer("digits", [tensor], request_id="mine").as_numpy("OUTPUT_0")
    assert scores.shape == (2, 10)
    best = client.infer("digits", [tensor], outputs=[triton.InferRequestedOutput("OUTPUT_0", class_count=1)])
    print(best.as_numpy("OUTPUT_0"))
