"""The target's gRPC API: the servicer, and the conversion between protobuf messages and internal types."""
