"""Transport for all services: gRPC servers, channels and streams, error mapping, tensors, colocated IPC."""
