"""Sources of models: one module for each kind, all with the interface in `base`."""
