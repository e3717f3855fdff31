"""Saved static graphs: their signature, manifest, preprocess spec, golden samples and errors.

This package imports the standard library and numpy only, so that the thin client can share it.
"""
