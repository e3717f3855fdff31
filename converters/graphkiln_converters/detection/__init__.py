"""The part of a detector behind its heads, as PyTorch that exports with a batch: suppression, ranking, padding."""
