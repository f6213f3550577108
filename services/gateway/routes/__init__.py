"""The REST routes, one module per family.

Routes only convert requests and replies.
"""
