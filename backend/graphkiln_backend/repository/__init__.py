"""Where graphs live: the layout of a model repository and its version folders."""
