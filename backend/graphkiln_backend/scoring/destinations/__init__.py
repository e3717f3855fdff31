"""Where answers go: each module commits a unit in one step, under its id."""
