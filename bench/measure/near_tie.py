"""Where a greedy text parts from another: whether the model in fp32, free of the roundings of 16-bit types, has both tokens nearly tied."""

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
"""How much of the best logit two tokens may be apart in fp32 that texts in a 16-bit type choose between: two of bf16's unit roundoffs, 2^-8
each. In bf16 the gap of the two best logits of the embedded target is off by 0.84 of them (root mean square over 1,152 tokens of its texts;
99 of 100 by less than 2.5). See docs/numerics.md."""
PAGE_SIZE = 16


@dataclass(frozen=True, slots=True)
class Parting:
    """The first token in which two greedy texts differ.

    Attributes:
        token: Its index in the answers.
        choices: The token ids, of the text without speculation and of the other.
        best: The two best tokens in fp32, with their logits.
        gap: From the best logit to the lower one of the choices'.
        allowed: How much that may be.
    """

    token: int
    choices: tuple[int, int]
    best: tuple[tuple[int, float], tuple[int, float]]
    gap: float
    allowed: float

    @property
    def is_near_tie(self) -> bool:
        """Whether rounding explains it."""
        return self.gap <= self.allowed

    def as_json(self) -> dict[str, Any]:
        """Return it with rounded numbers."""
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
    """A target in fp32 on the CPU.

    Args:
        target: Folder of the model, with its tokenizer.
    """

    def __init__(self, target: Path) -> None:
        self._codec = TextCodec.load(target)
        self._decoder = load_decoder(target, "cpu", torch.float32)

    def parting(
        self, messages: Sequence[Mapping[str, Any]], off: Sequence[int], other: Sequence[int]
    ) -> Parting:
        """Look at the first difference of two answers to one conversation, which are as long and not the same."""
        at = next(index for index, (a, b) in enumerate(zip(off, other, strict=False)) if a != b)
        logits = self.next_logits([*self._codec.encode_chat(messages, {}), *off[:at]])
        best = logits.topk(2)
        first, second = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        gap = first[1] - min(float(logits[off[at]]), float(logits[other[at]]))
        return Parting(at, (off[at], other[at]), (first, second), gap, NEAR_TIE * abs(first[1]))

    @torch.inference_mode()
    def next_logits(self, tokens: Sequence[int]) -> torch.Tensor:
        """Return ``[V]``, the logits behind `tokens`."""
        decoder, attention = self._decoder, create_backend("auto", self._decoder.device)
        pool = decoder.make_pool(-(-len(tokens) // PAGE_SIZE), PAGE_SIZE)
        lease = pool.lease(len(tokens))
        assert lease is not None
        attention.plan(build_batch(pool, [lease], [0], [len(tokens)]))
        hidden = decoder.forward(torch.tensor(tokens), torch.arange(len(tokens)), attention, pool).hidden
        return decoder.logits(hidden[-1:]).float()[0]
