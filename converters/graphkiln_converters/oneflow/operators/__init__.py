"""Translations of OneFlow's operations to ONNX, one function for each operation.

Source: OneFlow 0.9.0, the dialect's definitions and the documentation of `oneflow.nn.functional`. Unspecified behavior
follows OneFlow's recorded outputs, with which the tests compare every function.
"""
