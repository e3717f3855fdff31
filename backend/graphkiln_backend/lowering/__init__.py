"""Chooses how a graph runs, builds it, and proves it before it may serve."""
