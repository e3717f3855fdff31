"""Soak and fuzz: a server under traffic and faults, every answer checked (`scripts/soak`)."""
