"""The greedy answer of a reference model that reads whole sequences without a KV cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence


def greedy_answer(
    next_tokens: Callable[[Sequence[int]], Sequence[int]], prompt: Sequence[int], guess: Sequence[int]
) -> list[int]:
    """Return as many greedy tokens of the reference as `guess` has.

    One pass confirms all tokens of a right guess. After a wrong one, the reference generates token by token.

    Args:
        next_tokens: Computes the reference's most likely next token after each of the given tokens.
        prompt: The prompt.
        guess: A probable answer. It saves passes, and does not affect the result.
    """
    tokens, end, known = [*prompt, *guess], len(prompt) + len(guess), len(prompt)
    while known < end:
        following = next_tokens(tokens)
        while known < len(tokens) and following[known - 1] == tokens[known]:
            known += 1
        if known < end:
            tokens = [*tokens[:known], following[known - 1]]
            known += 1
    return tokens[len(prompt) :]
