"""Products of more than a few rows; the tensor memory accelerator (TMA) loads both operands in tiles."""
