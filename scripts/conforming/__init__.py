"""ONNX's own backend test suite, asked of the real server."""
