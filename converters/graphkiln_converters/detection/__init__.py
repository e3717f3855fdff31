"""Post-processing of detectors as exportable PyTorch modules with a batch: suppression, ranking, padding."""
