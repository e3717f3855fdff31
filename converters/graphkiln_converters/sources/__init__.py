"""Where models come from: one module for each kind of source, all of the same shape (see `base`)."""
