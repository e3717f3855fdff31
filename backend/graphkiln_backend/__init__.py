"""The server side of graphkiln: what a saved graph is, how it is proven, lowered, and served on NVIDIA Triton."""
