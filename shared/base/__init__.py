"""Shared by every service: errors, settings, shutdown, and parameters and statistics of a generation.

Imports neither torch nor gRPC.
"""
