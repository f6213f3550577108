"""Receives messages from targets over gRPC or unix sockets, and turns them into draft engine commands."""
