"""gRPC face of the target: messages to and from our own types."""
