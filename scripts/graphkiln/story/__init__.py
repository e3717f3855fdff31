"""The acceleration story: a PyTorch model made faster step by step, each step proven and measured."""
