"""Reader of OneFlow's saved graphs without OneFlow: the MLIR parser, and the translation to ONNX with the weights."""
