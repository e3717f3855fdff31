"""The load generator: open and closed loops from processes of their own, whose latencies are charged from due time."""
