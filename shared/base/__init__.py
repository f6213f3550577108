"""Foundations of every service: errors, settings, shutdown, parameters and statistics of a generation.

Imports neither torch nor gRPC.
"""
