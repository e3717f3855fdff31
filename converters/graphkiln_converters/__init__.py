"""Source model -> proven version folder: one module per source framework, and the writer that they share."""
