"""Foundations of every service: errors, settings, shutdown. Imports neither torch nor gRPC."""
