"""topk_expand: the best children of every beam row, and the best rows of the next beam; `expand_level` is both, and the bookkeeping."""

from __future__ import annotations

import torch

from outrider.kernels._dispatch import use_triton
from outrider.kernels._launch import expect
from outrider.kernels.topk_expand import reference
from outrider.kernels.topk_expand.types import Beam, Candidates, Expansion, Noise, num_candidates

__all__ = [
    "Beam",
    "Candidates",
    "Expansion",
    "Noise",
    "expand_level",
    "num_candidates",
    "select_beam",
    "topk_expand",
]


def topk_expand(
    logits: torch.Tensor,
    parent_scores: torch.Tensor,
    topk: int,
    *,
    d2t: torch.Tensor | None = None,
    temperature: torch.Tensor | None = None,
    seeds: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
    choices: torch.Tensor | None = None,
) -> Expansion:
    """Return the topk best children of every row, ranked by (logit descending, draft id ascending), and their path scores in fp32.

    A row adds ``log q = log_softmax(logits)`` to its parent's score, over the draft vocabulary where there is one. With a temperature T > 0
    the vector that ranks is ``log q / T + gumbel(seed, position, choice, target id)``, the noise that the target will sample with (Gumbel
    coupling), and its log_softmax is what is added. Either is <= 0, so a child never outranks its parent.

    Args:
        logits: ``[rows, V]`` fp32/bf16/fp16.
        parent_scores: ``[rows] fp32``, cumulative scores of the rows (0 for a root).
        topk: Children per row, 1..V.
        d2t: ``[V] int64`` offsets of a draft vocabulary: target id = draft id + d2t[draft id]. None: draft ids are target ids.
        temperature: ``[rows] fp32``, 0 = no noise in that row; None = no noise in any row.
        seeds, positions, choices: ``[rows]`` int64, int64, int32 as in `gumbel_noise`; needed with a temperature. The position is that
            of the child's token.

    Returns:
        Token ids (target), cumulative scores, and the draft's own log-probs.

    Raises:
        ValueError: A tensor's shape or dtype is wrong, topk exceeds V, or a temperature comes without its noise; the message names it.
    """
    rows, vocab = logits.shape
    expect("logits", logits, (rows, vocab))
    expect("parent_scores", parent_scores, (rows,), torch.float32)
    if not 1 <= topk <= vocab:
        raise ValueError(f"topk is {topk}, expected 1..{vocab} (the draft vocabulary)")
    if d2t is not None:
        expect("d2t", d2t, (vocab,), torch.int64)
    noise = None
    if temperature is not None:
        if seeds is None or positions is None or choices is None:
            raise ValueError("temperature needs seeds, positions and choices")
        expect("temperature", temperature, (rows,), torch.float32)
        noise = Noise(temperature, seeds, positions, choices)
    if use_triton(logits):
        from outrider.kernels.topk_expand import triton as compiled

        return compiled.topk_expand(logits, parent_scores, topk, d2t, noise)
    return reference.topk_expand(logits, parent_scores, topk, d2t, noise)


def select_beam(scores: torch.Tensor, topk: int) -> torch.Tensor:
    """Return the next beam: the topk best candidates of every sequence by (score descending, candidate index ascending).

    Args:
        scores: ``[bs, C] fp32``, cumulative scores of the candidates of one level; -inf = not a candidate (ranks last).
        topk: Beam width, 1..C.

    Returns:
        ``[bs, topk] int32`` candidate indices.

    Raises:
        ValueError: A tensor's shape or dtype is wrong, or topk exceeds C.
    """
    bs, candidates = scores.shape
    expect("scores", scores, (bs, candidates), torch.float32)
    if not 1 <= topk <= candidates:
        raise ValueError(f"topk is {topk}, expected 1..{candidates} (the candidates of a level)")
    if use_triton(scores):
        from outrider.kernels.topk_expand import triton as compiled

        return compiled.select_beam(scores, topk)
    return reference.select_beam(scores, topk)


def expand_level(
    logits: torch.Tensor,
    beam: Beam | None,
    level: int,
    topk: int,
    candidates: Candidates,
    *,
    words: int,
    last: bool,
    d2t: torch.Tensor | None = None,
    noise: Noise | None = None,
) -> Beam | None:
    """Score the children of a level's rows by `topk_expand`, note them as candidates, and make the next beam as `select_beam` picks it.

    Args:
        logits: ``[rows, V]`` fp32/bf16/fp16: of the roots, ``[bs, V]``, at level 0, else of the beam's rows, ``[bs * topk, V]``.
        beam: The rows of this level; None at level 0.
        level: 0 for the children of the roots.
        topk: Children per row and width of the beam, 1..V.
        candidates: Where the children go: the columns ``candidates.level(level, topk)`` are written.
        words: Mask words of a row of the next beam.
        last: No beam is wanted.
        d2t: As in `topk_expand`.
        noise: One entry per **sequence**, its positions those of the tokens behind the roots (a level adds its number); None = greedy.

    Returns:
        The next beam, or None.

    Raises:
        ValueError: A tensor's shape or dtype is wrong; the message names it.
    """
    bs, columns = candidates.scores.shape
    rows, vocab = bs if level == 0 else bs * topk, logits.shape[1]
    expect("logits", logits, (rows, vocab))
    if not 1 <= topk <= vocab:
        raise ValueError(f"topk is {topk}, expected 1..{vocab} (the draft vocabulary)")
    if candidates.level(level, topk).stop > columns:
        raise ValueError(
            f"candidates has {columns} columns, level {level} takes those up to {candidates.level(level, topk).stop}"
        )
    if (beam is None) != (level == 0):
        raise ValueError("beam is for the levels from 1, and they need it")
    if noise is not None:
        expect("noise.temperature", noise.temperature, (bs,), torch.float32)
        expect("noise.positions", noise.positions, (bs,))
    if use_triton(logits):
        from outrider.kernels.topk_expand import triton as compiled

        return compiled.expand_level(logits, beam, level, topk, candidates, words, last, d2t, noise)
    return reference.expand_level(logits, beam, level, topk, candidates, words, last, d2t, noise)
