"""Load generator: open and closed loops in separate processes, with latencies measured from the due time."""
