"""Bytes -> pixels -> tensor: the preprocessing shared by client, converters and server."""
