"""The Triton backend: a thin model class over an executor, and what an instance reports of itself."""
