"""Attention of one tile in plain torch, in place of a library's."""

from __future__ import annotations

import torch

from outrider.shared.attn.tiles import TileShape


def attend_tile(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend as `chunks.Attend` describes, with outputs strided as cuDNN's."""
    group = q.shape[1] // k.shape[1]
    k, v = (one.repeat_interleave(group, dim=1).float() for one in (k, v))
    scores = torch.einsum("rhd,thd->hrt", q.float(), k) * scale
    if causal:
        rows, keys = q.shape[0], k.shape[0]
        assert rows == keys, "a causal tile is square"
        scores = scores.masked_fill(torch.ones(rows, keys, dtype=torch.bool).triu(1), float("-inf"))
    out = torch.einsum("hrt,thd->hrd", scores.softmax(-1), v)
    return out.to(q.dtype).transpose(0, 1), scores.logsumexp(-1).t()


class Recorder:
    """`attend_tile` that also records the shapes of its calls. `wrong` changes its results.

    Attributes:
        fails: True to fail all further calls.
    """

    def __init__(self, wrong: float = 0.0) -> None:
        self.shapes: list[TileShape] = []
        self.fails = False
        self._wrong = wrong

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self.fails:
            raise RuntimeError("out of memory")
        assert q.is_contiguous()
        assert k.is_contiguous()
        assert v.is_contiguous()
        self.shapes.append(TileShape(q.shape[0], k.shape[0], causal))
        out, lse = attend_tile(q, k, v, causal, scale)
        return out, lse + self._wrong
