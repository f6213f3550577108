"""The draft service: follows the target's sequences and proposes token trees.

It never decides which tokens are emitted.
"""
