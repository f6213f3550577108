"""Products of about 65 to 512 rows; the tensor memory accelerator (TMA) loads both operands in tiles."""
