"""The draft service: follows the target's sequences and proposes token trees.

The service never decides which tokens are emitted.
"""
