"""What would go wrong when this machine serves: checks that find out, each by itself."""
