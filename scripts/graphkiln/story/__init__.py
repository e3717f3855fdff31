"""The acceleration story: accelerate a PyTorch model step by step, and prove and measure each step."""
