"""A content-addressed store of artifacts: what was built once for a key is found by that key, verified at each use."""
