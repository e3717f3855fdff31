"""Sources: each module divides one kind of input into ranges, and reads their rows."""
