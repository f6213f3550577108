"""gRPC for all services: servers, channels, direct streams, error mapping, tensors on the wire, polling."""
