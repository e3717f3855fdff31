"""Rewrites of a saved graph: each module one rewrite, graph in, graph out (see `base`)."""
