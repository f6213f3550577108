"""Products of more than a few rows, with both operands loaded in tiles by the tensor memory accelerator (TMA)."""
