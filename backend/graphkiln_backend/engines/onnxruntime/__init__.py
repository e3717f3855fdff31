"""ONNX Runtime: the reference engine, on the CPU or on CUDA.

The only package that imports `onnxruntime`, except for `engines.tensorrt`.
"""

import os

# ONNX Runtime for Linux (since 1.31) reports usage to its vendor unless this is set before the import, which already
# writes a machine identifier and a store of reports into the home folder.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

import onnxruntime

from graphkiln_backend.engines.onnxruntime.engine import OnnxRuntimeEngine
from graphkiln_backend.engines.onnxruntime.session import OnnxRuntimeSession

onnxruntime.disable_telemetry_events()

__all__ = ["OnnxRuntimeEngine", "OnnxRuntimeSession"]
