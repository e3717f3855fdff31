"""Independent checks for problems with serving models on this machine."""
