"""Sources: each module finds ranges of one kind of input, and reads their rows."""
