"""Cuts the tokens of a pass at stop tokens and the length limit, and appends kept tokens to a sequence."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.services.target.scheduling.sequence import Sequence
from outrider.shared.base.generation import FinishReason


@dataclass(frozen=True, slots=True)
class Advance:
    """Progress of one sequence in one forward pass.

    Attributes:
        kept: The tokens that are kept and emitted.
        num_cut: Number of tokens that were dropped after a stop token or the length limit.
        finish: The reason why the sequence ends with these tokens. None if the sequence continues.
        matched_token: The stop token that ended the sequence. None if no stop token ended it.
    """

    kept: list[int]
    num_cut: int
    finish: FinishReason | None
    matched_token: int | None


def advance(sequence: Sequence, emitted: list[int]) -> Advance:
    """Append the tokens that a pass has chosen to a sequence, up to the first stop token or the length limit.

    All later tokens are dropped. Lengths, usage and noise positions do not include dropped tokens.
    """
    kept, finish, matched = emitted, None, None
    stop_ids, remaining = sequence.stop_ids, sequence.remaining
    for index, token in enumerate(emitted):
        if token in stop_ids:
            kept, finish, matched = emitted[: index + 1], FinishReason.STOP, token
            break
        if index + 1 == remaining:
            kept, finish = emitted[: index + 1], FinishReason.LENGTH
            break
    sequence.tokens.extend(kept)
    return Advance(kept, len(emitted) - len(kept), finish, matched)
