"""ONNX Runtime: the reference engine, on the CPU or on CUDA.

The one home of `import onnxruntime` (beside `engines.tensorrt`, which reaches TensorRT through it).
"""

import os

# ONNX Runtime for Linux (since 1.31) reports usage to its vendor unless this is set: a model server must not. If it is
# set after the import, an identifier of the machine and a store of reports are in the home folder by then.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

import onnxruntime

from graphkiln_backend.engines.onnxruntime.engine import OnnxRuntimeEngine
from graphkiln_backend.engines.onnxruntime.session import OnnxRuntimeSession

onnxruntime.disable_telemetry_events()

__all__ = ["OnnxRuntimeEngine", "OnnxRuntimeSession"]
