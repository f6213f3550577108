"""The REST routes, one module per family.

Routes only convert requests for the core, and its results to replies.
"""
