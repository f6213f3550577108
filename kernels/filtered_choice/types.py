"""Result type of filtered_choice: for each row, the most likely tokens, up to the limits of the filters."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Kept:
    """End of the prefix of tokens that top-k and top-p keep in each row.

    A row keeps all tokens whose key is above the row's entry in `keys`. If several tokens have exactly this
    key, the row keeps the `ties` tokens with the lowest ids among them.

    Attributes:
        keys: ``[rows] int32``, key of the last kept token, in the order of `token_keys`.
        ties: ``[rows] int32``, number of kept tokens with exactly that key.
    """

    keys: torch.Tensor
    ties: torch.Tensor

    def mask(self, token_keys: torch.Tensor) -> torch.Tensor:
        """Return which tokens stay, ``[rows, V] bool``. This method is meant for tests.

        Args:
            token_keys: ``[rows, V] int32``, result of `reference.token_keys` for the same rows.
        """
        tied = token_keys == self.keys[:, None]
        return (token_keys > self.keys[:, None]) | (tied & (tied.cumsum(dim=1) <= self.ties[:, None]))
