"""The two blobs of a round that stays on the devices of target and draft: a state there, trees back.

    header    int32[64], the first is the number of the round that the rest belongs to
    state     `RoundState.packed`
    trees     int32: num_nodes [bs], tokens [bs, N], parents [bs, N]; the root is node 0, whose token and parent are ignored

Depths, masks and roots are not sent: the target's device makes them while it checks the trees (`kernels.tree_check`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from outrider.shared.spec.device import RoundState, packed_bytes

HEADER_BYTES = 256
MAX_BATCH = 4096
MAX_COLUMNS = 256


@dataclass(frozen=True, slots=True)
class StateBlob:
    """A state with its header, in memory that never moves.

    Attributes:
        blob: ``[n] uint8``, all of it.
        number: ``[1] int32``, view.
        state: Views.
    """

    blob: torch.Tensor
    number: torch.Tensor
    state: RoundState

    @classmethod
    def make(cls, bs: int, columns: int, feature_size: int, dtype: torch.dtype, device: torch.device) -> StateBlob:
        """Make one of idle rows."""
        with torch.inference_mode(False):
            blob = torch.zeros(HEADER_BYTES + packed_bytes(bs, columns, feature_size, dtype), dtype=torch.uint8, device=device)
            state = RoundState.of_packed(blob[HEADER_BYTES:], bs, columns, feature_size, dtype)
            return cls(blob, blob[:4].view(torch.int32), state)


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

    @property
    def body(self) -> torch.Tensor:
        """All but the header."""
        return self.blob[HEADER_BYTES:]


def trees_bytes(bs: int, nodes: int) -> int:
    """Return the bytes of a `TreesBlob`."""
    return HEADER_BYTES + 4 * bs * (1 + 2 * nodes)
