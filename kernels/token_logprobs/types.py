"""Sizes of the results of token_logprobs."""

MAX_TOP = 20
"""Largest number of most likely tokens."""
WORDS = 1 + 2 * MAX_TOP
"""int32 words of a result."""
