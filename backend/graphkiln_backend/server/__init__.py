"""Finds a tritonserver, builds its command line, runs it and looks after it."""
