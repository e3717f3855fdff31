"""Same outputs or not: the numeric policy, the comparison and the verdict. Pure numpy."""
