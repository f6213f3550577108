"""topk_expand: finds the best children of each row of a draft tree's beam, the next beam, or both at once."""

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
    """Return the topk best children of every row (tree node), and the children's scores.

    Without a temperature, children are ranked by (logit descending, draft id ascending). Let
    ``log q = log_softmax(logits)``, computed over the draft vocabulary if there is one. The score of a child
    is its parent's score plus log q.

    With a temperature T > 0, children are ranked by ``log q / T`` plus the Gumbel noise of (seed, position,
    choice, target id). The target will sample with the same noise (Gumbel coupling). The score of a child is
    its parent's score plus the log_softmax of these ranked numbers.

    In both cases, the added number is <= 0, so a child never outranks its parent.

    Args:
        logits: ``[rows, V]`` fp32/bf16/fp16.
        parent_scores: ``[rows] fp32``, cumulative scores of the rows (0 for a root).
        topk: Children per row, 1..V.
        d2t: ``[V] int64`` offsets of a draft vocabulary: target id = draft id + d2t[draft id]. With None,
            draft ids are target ids.
        temperature: ``[rows] fp32``. A row with temperature 0 gets no noise. With None, no row gets noise.
        seeds: ``[rows] int64`` as in `gumbel_noise`; required with a temperature.
        positions: ``[rows] int64``, position of the child's token; required with a temperature.
        choices: ``[rows] int32`` as in `gumbel_noise`; required with a temperature.

    Returns:
        Target token ids, cumulative scores in fp32, and the draft's own log-probs.

    Raises:
        ValueError: A tensor's shape or dtype is wrong, topk exceeds V, or a temperature is given without
            its noise parameters. The message names the cause.

    Example:
        Tokens 1 and 2 tie, so the lower id ranks first.

        >>> import torch
        >>> from outrider.kernels.topk_expand import topk_expand
        >>> logits = torch.tensor([[0.5, 0.25, 0.25]]).log()
        >>> children = topk_expand(logits, torch.tensor([-1.0]), 2)
        >>> children.token_ids.tolist()
        [[0, 1]]
        >>> children.scores
        tensor([[-1.6931, -2.3863]])
        >>> children.logprobs
        tensor([[-0.6931, -1.3863]])
    """
    rows, vocab = logits.shape
    expect("logits", logits, (rows, vocab))
    expect("parent_scores", parent_scores, (rows,), torch.float32)
    if not 1 <= topk <= vocab:
        raise ValueError(f"topk is {topk}, expected 1..{vocab} (the size of the draft vocabulary)")
    if d2t is not None:
        expect("d2t", d2t, (vocab,), torch.int64)
    noise = None
    if temperature is not None:
        if seeds is None or positions is None or choices is None:
            raise ValueError("temperature requires seeds, positions and choices")
        expect("temperature", temperature, (rows,), torch.float32)
        noise = Noise(temperature, seeds, positions, choices)
    if use_triton(logits):
        from outrider.kernels.topk_expand import triton as compiled

        return compiled.topk_expand(logits, parent_scores, topk, d2t, noise)
    return reference.topk_expand(logits, parent_scores, topk, d2t, noise)


def select_beam(scores: torch.Tensor, topk: int) -> torch.Tensor:
    """Return every sequence's next beam: the topk best candidates by (score descending, index ascending).

    Args:
        scores: ``[bs, C] fp32``, cumulative scores of the candidates of one level. -inf marks a column
            that is not a candidate and ranks last.
        topk: Beam width, 1..C.

    Returns:
        ``[bs, topk] int32`` candidate indices.

    Raises:
        ValueError: A tensor's shape or dtype is wrong, or topk exceeds C.

    Example:
        >>> import torch
        >>> from outrider.kernels.topk_expand import select_beam
        >>> select_beam(torch.tensor([[-1.0, -0.5, -0.5, -3.0]]), 3)
        tensor([[1, 2, 0]], dtype=torch.int32)
    """
    bs, candidates = scores.shape
    expect("scores", scores, (bs, candidates), torch.float32)
    if not 1 <= topk <= candidates:
        raise ValueError(f"topk is {topk}, expected 1..{candidates} (the number of candidates of a level)")
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
    """Expand one level of a draft tree: score the children, store them, and select the next beam.

    This fuses `topk_expand` and `select_beam`.

    Args:
        logits: ``[rows, V]`` fp32/bf16/fp16: ``[bs, V]`` of the roots at level 0, otherwise
            ``[bs * topk, V]`` of the beam's rows.
        beam: Beam that the logits belong to; None at level 0.
        level: 0 for the children of the roots.
        topk: Children per row and width of the beam, 1..V.
        candidates: Receives the children in the columns ``candidates.level(level, topk)``.
        words: Mask words per row of the next beam.
        last: True if no next beam is needed.
        d2t: Offsets of a draft vocabulary, as in `topk_expand`.
        noise: Noise parameters, one entry per **sequence**. The positions are those of the tokens after the
            roots; the op adds the level. With None, there is no noise.

    Returns:
        The next beam, or None if `last`.

    Raises:
        ValueError: A tensor's shape or dtype, `topk` or `beam` is wrong. The message names
            the argument.

    Example:
        A tree of width 2 is expanded by two levels, over a vocabulary of three tokens.

        >>> import torch
        >>> from outrider.kernels.topk_expand import Candidates, expand_level
        >>> candidates = Candidates.make(1, 2, 2, torch.device("cpu"))
        >>> roots = torch.tensor([[0.6, 0.1, 0.3]]).log()
        >>> beam = expand_level(roots, None, 0, 2, candidates, words=1, last=False)
        >>> beam.tokens.tolist()
        [0, 2]
        >>> rows = torch.tensor([[0.1, 0.7, 0.2], [0.8, 0.15, 0.05]]).log()
        >>> expand_level(rows, beam, 1, 2, candidates, words=1, last=True)
        >>> candidates.tokens.tolist(), candidates.parents.tolist()
        ([[0, 2, 1, 2, 0, 1]], [[-1, -1, 0, 0, 1, 1]])
        >>> candidates.scores.exp()
        tensor([[0.6000, 0.3000, 0.4200, 0.1200, 0.2400, 0.0450]])
    """
    bs, columns = candidates.scores.shape
    rows, vocab = bs if level == 0 else bs * topk, logits.shape[1]
    expect("logits", logits, (rows, vocab))
    if not 1 <= topk <= vocab:
        raise ValueError(f"topk is {topk}, expected 1..{vocab} (the size of the draft vocabulary)")
    if candidates.level(level, topk).stop > columns:
        raise ValueError(
            f"candidates has {columns} columns, but level {level} needs {candidates.level(level, topk).stop}"
        )
    if (beam is None) != (level == 0):
        raise ValueError("beam must be None at level 0 and given at all other levels")
    if noise is not None:
        expect("noise.temperature", noise.temperature, (bs,), torch.float32)
        expect("noise.positions", noise.positions, (bs,))
    if use_triton(logits):
        from outrider.kernels.topk_expand import triton as compiled

        return compiled.expand_level(logits, beam, level, topk, candidates, words, last, d2t, noise)
    return reference.expand_level(logits, beam, level, topk, candidates, words, last, d2t, noise)
