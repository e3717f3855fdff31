"""ONNX's own backend test suite, run by the real server."""
