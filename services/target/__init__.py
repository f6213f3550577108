"""The target service: owns the model and its KV cache, schedules requests and verifies drafts.

Token ids in, token ids out. The gateway tokenizes.
"""
