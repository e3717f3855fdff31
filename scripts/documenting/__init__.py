"""Generated pages of the documentation, and hooks of its site."""
