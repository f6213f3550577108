"""`outrider bench kernels`: each kernel against its floor."""
