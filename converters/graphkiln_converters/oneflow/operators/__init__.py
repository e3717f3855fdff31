"""OneFlow's operations in ONNX: a module for each kind, a function for each operation.

Source: OneFlow 0.9.0, the dialect's definitions and the documentation of `oneflow.nn.functional`; what they leave open
was found in OneFlow's own outputs, which the tests compare every one of these functions to.
"""
