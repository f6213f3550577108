"""The resident state of a round: the new tokens of its sequences are filled in, with or without features."""

from __future__ import annotations

import torch

from outrider.shared.spec.resident import RoundState
from outrider.shared.spec.seeds import signed_seed


def state() -> RoundState:
    return RoundState.idle(3, 3, 2, torch.float32, "cpu")


def rows(count: int, value: float) -> torch.Tensor:
    return torch.full((count, 2), value)


def test_rows_of_different_lengths_and_pieces_are_filled() -> None:
    filled = state()
    filled.fill([[5], [6, 7, 8]], [[rows(1, 1.0)], [rows(2, 2.0), rows(1, 3.0)]])
    assert filled.counts.tolist() == [1, 3, 0]
    assert filled.tokens.tolist() == [[5, 0, 0], [6, 7, 8], [0, 0, 0]]
    assert filled.features[:, :, 0].tolist() == [[1, 0, 0], [2, 2, 3], [0, 0, 0]]


def test_rows_of_one_length_are_filled_in_one_copy() -> None:
    filled = state()
    filled.fill([[5, 6], [7, 8]], [[rows(2, 1.0)], [rows(2, 2.0)]])
    assert filled.features[:, :, 1].tolist() == [[1, 1, 0], [2, 2, 0], [0, 0, 0]]


def test_a_row_without_features_keeps_what_the_state_held() -> None:
    filled = state()
    filled.fill([[5], [6]], [[], [rows(1, 4.0)]])
    assert filled.features[:, 0, 0].tolist() == [0, 4, 0]
    filled.fill([[9]])
    assert filled.features[1, 0, 0] == 4
    assert filled.counts.tolist() == [1, 1, 0]


def test_a_seed_keeps_its_64_bits() -> None:
    assert [signed_seed(seed) for seed in (0, (1 << 63) - 1, 1 << 63, (1 << 64) - 1, 1 << 64)] == [
        0,
        (1 << 63) - 1,
        -(1 << 63),
        -1,
        0,
    ]
