"""OneFlow's saved graphs, read without OneFlow: the graph (`mlir`), its weights (`state`), and their translation."""
