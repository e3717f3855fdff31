"""The `graphkiln` command: one module per verb."""
