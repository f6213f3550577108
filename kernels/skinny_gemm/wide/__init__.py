"""Products of more than a few rows: tiles of both operands through the tensor memory accelerator."""
