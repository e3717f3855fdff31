"""How requests travel: one module per protocol, all behind the protocol of `transports.base`."""
