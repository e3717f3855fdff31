"""Bytes -> pixels -> tensor: the one implementation of preprocessing, for client, converters and server alike."""
