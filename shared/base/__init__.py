"""Base code of every service: errors, settings, shutdown, and the parameters and statistics of a generation.

Imports neither torch nor gRPC.
"""
