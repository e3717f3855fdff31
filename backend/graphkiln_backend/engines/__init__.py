"""Graph -> session: one module per runtime, all behind the protocol of `engines.base`."""
