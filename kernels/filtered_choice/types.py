"""The data of filtered_choice."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Kept:
    """What filters keep of each row: every token of a larger key than `keys`, and of those with that key the `ties` lowest ids.

    Attributes:
        keys: ``[rows] int32``, in the order of `token_keys`.
        ties: ``[rows] int32``.
    """

    keys: torch.Tensor
    ties: torch.Tensor

    def mask(self, token_keys: torch.Tensor) -> torch.Tensor:
        """Return which tokens stay, ``[rows, V] bool``; for tests.

        Args:
            token_keys: ``[rows, V] int32``, as the version that found the rows has them: `reference.token_keys`.
        """
        tied = token_keys == self.keys[:, None]
        return (token_keys > self.keys[:, None]) | (tied & (tied.cumsum(dim=1) <= self.ties[:, None]))
