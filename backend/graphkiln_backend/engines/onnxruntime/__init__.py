"""ONNX Runtime: the reference engine, on the CPU or on CUDA.

The one home of `import onnxruntime` (beside `engines.tensorrt`, which reaches TensorRT through it).
"""

import onnxruntime

from graphkiln_backend.engines.onnxruntime.engine import OnnxRuntimeEngine
from graphkiln_backend.engines.onnxruntime.session import OnnxRuntimeSession

# ONNX Runtime 1.31 for Linux reports usage to its vendor unless told not to: a model server must not.
onnxruntime.disable_telemetry_events()

__all__ = ["OnnxRuntimeEngine", "OnnxRuntimeSession"]
