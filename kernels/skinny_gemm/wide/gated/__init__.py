"""Gate-up product of an MLP, fused with the activation, for about 65 to 512 rows."""
