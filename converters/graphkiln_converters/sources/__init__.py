"""Model sources: one module per kind, on the interface in `base`."""
