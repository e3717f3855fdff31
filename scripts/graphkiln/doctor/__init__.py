"""Checks for what would go wrong if this machine served models; each runs by itself."""
