"""verify: samples the target's token after each tree node, and walks the tree to accept matching drafts.

The token is a function of (logits, sampling parameters, seed, absolute position), so speculative and plain
decoding choose the same tokens. Top-k, top-p and min-p are computed in one of two places:

- `kernels/filtered_choice` searches for the tokens to keep. The Triton version normally uses this search.
- `kernels/verify/filters.py` sorts. The torch reference always sorts. The Triton version sorts in the cases
  that `kernels/verify/triton.py` explains.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from outrider.kernels._dispatch import use_triton
from outrider.kernels._launch import expect
from outrider.kernels.logit_rules import apply_rules
from outrider.kernels.token_masks import mask_tokens
from outrider.kernels.verify import reference
from outrider.kernels.verify.types import SamplingTensors, VerifiedTree

__all__ = ["SamplingTensors", "VerifiedTree", "choose_tokens", "verify_tree"]


def choose_tokens(logits: torch.Tensor, sampling: SamplingTensors, positions: torch.Tensor) -> torch.Tensor:
    """Choose one token for each row of logits, greedily or by sampling.

    A row with temperature 0 chooses its argmax. If several tokens tie, it chooses the lowest id. Any other
    row chooses ``argmax(filtered(logits / temperature) + gumbel(seed, position, choice, id))``.

    The filters run in the order top-k, top-p, min-p. Probabilities are renormalised after each filter. Tokens
    are ordered by (logit descending, id ascending):

    - top-k keeps exactly k tokens. In a tie at the k-th value, top-k keeps the lowest ids.
    - top-p keeps the shortest prefix whose probability reaches p.
    - min-p keeps the tokens with at least min_p times the best token's probability.

    Every filter keeps the best token. If `sampling.rules` is set, `logit_rules.apply_rules` changes the
    logits first. If `sampling.allowed` is set, only the tokens whose bit is set can be chosen.

    Args:
        logits: ``[rows, V]`` fp32/bf16/fp16. -inf is allowed (a masked token).
        sampling: Sampling parameters, one entry per row.
        positions: ``[rows] int64``, absolute index of the token being chosen (committed_len + depth of the
            node).

    Returns:
        ``[rows] int64``, the chosen tokens. The token is -1 if the row is poisoned. A poisoned row contains a
        NaN or +inf, or nothing above -inf.

    Raises:
        ValueError: A tensor's shape or dtype is wrong. The message names the tensor.

    Example:
        The three greedy rows contain a tie, a masked token, and a NaN.

        >>> import torch
        >>> from outrider.kernels.verify import SamplingTensors, choose_tokens
        >>> inf, nan = torch.inf, torch.nan
        >>> logits = torch.tensor([[1.0, 4.0, 4.0], [-inf, 0.0, 2.0], [0.0, nan, 1.0]])
        >>> sampling = SamplingTensors(
        ...     temperature=torch.zeros(3),
        ...     top_k=torch.zeros(3, dtype=torch.int32),
        ...     top_p=torch.ones(3),
        ...     min_p=torch.zeros(3),
        ...     seeds=torch.zeros(3, dtype=torch.int64),
        ...     choices=torch.zeros(3, dtype=torch.int32),
        ...     all_greedy=True,
        ...     any_filter=False,
        ... )
        >>> choose_tokens(logits, sampling, torch.arange(3))
        tensor([ 1,  2, -1])
    """
    rows = logits.shape[0]
    expect("logits", logits, (rows, None))
    expect("positions", positions, (rows,), torch.int64)
    expect("sampling.temperature", sampling.temperature, (rows,), torch.float32)
    expect("sampling.top_k", sampling.top_k, (rows,), torch.int32)
    expect("sampling.top_p", sampling.top_p, (rows,), torch.float32)
    expect("sampling.min_p", sampling.min_p, (rows,), torch.float32)
    expect("sampling.seeds", sampling.seeds, (rows,), torch.int64)
    expect("sampling.choices", sampling.choices, (rows,), torch.int32)
    if sampling.rules is not None:
        logits, sampling = apply_rules(logits, sampling.rules, positions), replace(sampling, rules=None)
    if sampling.allowed is not None:
        logits, sampling = mask_tokens(logits, sampling.allowed), replace(sampling, allowed=None)
    if use_triton(logits):
        from outrider.kernels.verify import triton as compiled

        return compiled.choose_tokens(logits, sampling, positions)
    return reference.choose_tokens(logits, sampling, positions)


def verify_tree(
    tokens: torch.Tensor, parents: torch.Tensor, num_nodes: torch.Tensor, chosen: torch.Tensor
) -> VerifiedTree:
    """Walk each draft tree from its root: descend while a child has the token chosen after the current node.

    Args:
        tokens: ``[bs, N] int32``, tokens of the nodes; column 0 is the root. Among siblings with the same
            token, the walk descends to the lowest index.
        parents: ``[bs, N] int32``, index of each node's parent, -1 for the root. Parents precede children.
        num_nodes: ``[bs] int32``, number of nodes of each tree, at least 1. Further columns are ignored.
        chosen: ``[bs, N] int64``, the token chosen after each node (`choose_tokens`); -1 stops the walk.

    Returns:
        The accepted path and the emitted tokens.

    Raises:
        ValueError: A tensor's shape or dtype is wrong. The message names the tensor.

    Example:
        A root (token 5) has two children (6 and 7). The target chooses 7 after the root, so node 2 is
        accepted. The target chooses 8 after node 2, so 8 is the bonus token.

        >>> import torch
        >>> from outrider.kernels.verify import verify_tree
        >>> tokens, parents = torch.tensor([[5, 6, 7]]).int(), torch.tensor([[-1, 0, 0]]).int()
        >>> tree = verify_tree(tokens, parents, torch.tensor([3]).int(), torch.tensor([[7, 9, 8]]))
        >>> tree.path.tolist(), tree.num_accepted.tolist(), tree.emitted.tolist()
        ([[0, 2, -1]], [1], [[7, 8, -1]])
    """
    bs, nodes = tokens.shape
    expect("tokens", tokens, (bs, nodes), torch.int32)
    expect("parents", parents, (bs, nodes), torch.int32)
    expect("num_nodes", num_nodes, (bs,), torch.int32)
    expect("chosen", chosen, (bs, nodes), torch.int64)
    if use_triton(tokens):
        from outrider.kernels.verify import triton as compiled

        return compiled.verify_tree(tokens, parents, num_nodes, chosen)
    return reference.verify_tree(tokens, parents, num_nodes, chosen)
