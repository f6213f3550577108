"""Describes the tokens, rounds and drafts of one answer in words, for the commands that print answers."""

from __future__ import annotations

from outrider.services.clients.received import PREFILL_TOKENS
from outrider.services.clients.rest import StreamedReply


def drafting_rounds(reply: StreamedReply) -> int | None:
    """Return the number of rounds with drafts; None if it is unknown, because no drafted token was accepted.

    The accept length is 1 + accepted tokens / rounds with drafts.
    """
    speculation = reply.speculation
    if not speculation.get("draft_tokens"):
        return 0
    accepted, length = speculation.get("accepted_tokens", 0), speculation["accept_length"]
    return round(accepted / (length - 1)) if accepted and length > 1 else None


def speculation_summary(reply: StreamedReply) -> str:
    """Return one line about the rounds of an answer.

    The accept length includes tokens after the end of the answer, which a stop token or the length limit cut
    off. The line says how many, because the other numbers do not include them.

    Example:
        >>> speculation = {"rounds": 4, "draft_tokens": 40, "accepted_tokens": 13, "accept_length": 7.5}
        >>> speculation_summary(StreamedReply(completion_tokens=18, speculation=speculation))
        '18 tokens in 4 rounds, 2 of them with drafts; accept length 7.50'
    """
    tokens, speculation = _count(reply.completion_tokens, "token"), reply.speculation
    rounds = speculation.get("rounds")
    if not rounds:
        return tokens
    line = f"{tokens} in {_count(rounds, 'round')}"
    drafting = drafting_rounds(reply)
    if drafting is None:
        return f"{line}; no drafted token was accepted"
    if drafting == 0:
        return f"{line} without drafts"
    if drafting == rounds:
        line += " with drafts" if rounds == 1 else ", all with drafts"
    else:
        line += f", {drafting} of them with drafts"
    line += f"; accept length {speculation['accept_length']:.2f}"
    cut = PREFILL_TOKENS + rounds + speculation["accepted_tokens"] - reply.completion_tokens
    return f"{line}, which counts {_count(cut, 'token')} after the end" if cut > 0 else line


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
