"""A matrix that streams past a few rows: what the kernels of two ops are made of."""
