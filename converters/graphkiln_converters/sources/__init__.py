"""Where models come from: one module per kind of source, all of the same shape (see `base`)."""
