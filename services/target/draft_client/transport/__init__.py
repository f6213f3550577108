"""Carries the draft protocol: gRPC streams, or sockets and mailboxes on one host."""
