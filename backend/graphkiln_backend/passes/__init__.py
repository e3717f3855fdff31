"""Graph rewrites on the `Pass` interface in `base`, and the analyses that splitting and sharding share."""
