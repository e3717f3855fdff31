"""Destinations: each module commits a unit in one step, under its id."""
