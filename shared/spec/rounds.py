"""The two blobs of a round that stays on the devices of target and draft: a state there, trees back.

    state     `RoundState.packed`: header, committed_lens, counts, tokens, features
    trees     header, then int32: num_nodes [bs], tokens [bs, N], parents [bs, N]; the root is node 0, whose token and parent are ignored
    header    int32[64], the first is the number of the round that the rest belongs to

Depths, masks and roots are not sent: the target's device makes them while it checks the trees (`kernels.tree_check`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from outrider.shared.spec.resident import HEADER_BYTES


@dataclass(frozen=True, slots=True)
class TreesBlob:
    """Trees with their header, in memory that never moves.

    Attributes:
        blob: ``[n] uint8``, all of it.
        number: ``[1] int32``, view.
        num_nodes: ``[bs] int32``, view.
        tokens, parents: ``[bs, N] int32``, views.
    """

    blob: torch.Tensor
    number: torch.Tensor
    num_nodes: torch.Tensor
    tokens: torch.Tensor
    parents: torch.Tensor

    @classmethod
    def make(cls, bs: int, nodes: int, device: torch.device) -> TreesBlob:
        """Make one of zeros."""
        with torch.inference_mode(False):
            blob = torch.zeros(trees_bytes(bs, nodes), dtype=torch.uint8, device=device)
            number, rest = blob[:4].view(torch.int32), blob[HEADER_BYTES:].view(torch.int32)
            num_nodes, tokens, parents = rest.split_with_sizes([bs, bs * nodes, bs * nodes])
            return cls(blob, number, num_nodes, tokens.view(bs, nodes), parents.view(bs, nodes))


def trees_bytes(bs: int, nodes: int) -> int:
    """Return the bytes of a `TreesBlob`."""
    return HEADER_BYTES + 4 * bs * (1 + 2 * nodes)
