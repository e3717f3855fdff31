"""OneFlow's saved graphs, read without OneFlow: text (`mlir`), weights (`state`), operators, and the ONNX graph."""
