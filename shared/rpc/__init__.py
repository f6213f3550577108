"""Transport for all services: gRPC servers, channels and streams, error mapping, tensors, colocated IPC."""

import os

# grpc's own log contains unescaped text of any peer. grpc reads this variable when it is loaded.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
