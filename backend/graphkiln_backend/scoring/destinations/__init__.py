"""Destinations: each module commits the result of a unit atomically, under its id."""
