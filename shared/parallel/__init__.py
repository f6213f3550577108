"""Tensor parallelism: one decoder split over several processes.

Rank 0 makes all decisions, and the other ranks mirror its forward passes.
"""
