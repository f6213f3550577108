"""Products of 1 to 4 rows without tensor cores: the kernels for `Method.SUM` and `Method.STAY`."""
