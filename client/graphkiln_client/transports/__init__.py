"""Transports for the KServe v2 protocol: HTTP and gRPC, each blocking and for event loops."""
