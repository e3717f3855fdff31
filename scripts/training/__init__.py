"""Training of the example models and of the weights for `graphkiln story`. Needs the extra `dev`."""
