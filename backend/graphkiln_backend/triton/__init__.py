"""The Triton backend: a thin layer between Triton's Python stub and a lowered session."""
