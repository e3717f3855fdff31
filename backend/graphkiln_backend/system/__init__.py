"""Processes, owned folders, signals, and the resources that this process may use."""
