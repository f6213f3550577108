"""How services speak gRPC: servers and channels with matching options, one error mapping, tensors on the wire."""
