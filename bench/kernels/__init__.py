"""`outrider bench kernels`: times each kernel and compares it with its floor."""
