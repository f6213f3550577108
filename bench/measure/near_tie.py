"""Checks whether two greedy texts differ because of a near-tie: two logits that are almost equal in fp32.

The check runs the model in fp32 because 16-bit rounding errors would hide a near-tie.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from outrider.services.gateway.tokenizer import TextCodec
from outrider.shared.attn.base import build_batch
from outrider.shared.attn.create import create_backend
from outrider.shared.nn.open import load_decoder

NEAR_TIE = 2.0**-7
"""Largest gap between two tokens' fp32 logits that counts as a near-tie, relative to the best logit.

The value is two unit roundoffs of bf16. One unit roundoff is 2^-8. docs/numerics.md describes the
measurements that support this value.
"""
PAGE_SIZE = 16


@dataclass(frozen=True, slots=True)
class Parting:
    """The first token at which two greedy texts differ: one without speculation, and another one.

    Attributes:
        token: Index of this token in the answers.
        choices: Token ids at this index, without speculation and in the other text.
        best: The two tokens with the largest fp32 logits, and these logits.
        gap: Largest logit minus the smaller logit of the two `choices`.
        allowed: Largest gap that counts as a near-tie.
    """

    token: int
    choices: tuple[int, int]
    best: tuple[tuple[int, float], tuple[int, float]]
    gap: float
    allowed: float

    @property
    def is_near_tie(self) -> bool:
        """True if rounding explains the difference."""
        return self.gap <= self.allowed

    def as_json(self) -> dict[str, Any]:
        """Return the difference as JSON values, with rounded numbers."""
        best = [[token, round(logit, 4)] for token, logit in self.best]
        return {
            "token": self.token,
            "choices": list(self.choices),
            "best_in_fp32": best,
            "gap": round(self.gap, 4),
            "allowed": round(self.allowed, 4),
            "near_tie": self.is_near_tie,
        }


class Judge:
    """Runs a target in fp32 on the CPU, to find out whether two of its texts differ because of a near-tie.

    Args:
        target: Folder of the model, with its tokenizer.
    """

    def __init__(self, target: Path) -> None:
        self._codec = TextCodec.load(target)
        self._decoder = load_decoder(target, "cpu", torch.float32)

    def parting(
        self, messages: Sequence[Mapping[str, Any]], off: Sequence[int], other: Sequence[int]
    ) -> Parting:
        """Return the first difference between two answers to one conversation.

        The answers must have equal length and differ somewhere.
        """
        at = next(index for index, (a, b) in enumerate(zip(off, other, strict=False)) if a != b)
        logits = self.next_logits([*self._codec.encode_chat(messages, {}), *off[:at]])
        best = logits.topk(2)
        first, second = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        gap = first[1] - min(float(logits[off[at]]), float(logits[other[at]]))
        return Parting(at, (off[at], other[at]), (first, second), gap, NEAR_TIE * abs(first[1]))

    @torch.inference_mode()
    def next_logits(self, tokens: Sequence[int]) -> torch.Tensor:
        """Return ``[V]``, the logits of the token that follows `tokens`."""
        decoder, attention = self._decoder, create_backend("auto", self._decoder.device)
        pool = decoder.make_pool(-(-len(tokens) // PAGE_SIZE), PAGE_SIZE)
        lease = pool.lease(len(tokens))
        assert lease is not None
        attention.plan(build_batch(pool, [lease], [0], [len(tokens)]))
        hidden = decoder.forward(torch.tensor(tokens), torch.arange(len(tokens)), attention, pool).hidden
        return decoder.logits(hidden[-1:]).float()[0]
