"""Rolling updates under load (`scripts/rolling-update`)."""
