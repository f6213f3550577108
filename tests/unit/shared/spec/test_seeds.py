"""Seeds of the resident state of a round."""

from __future__ import annotations

from outrider.shared.spec.seeds import signed_seed


def test_a_seed_keeps_its_64_bits() -> None:
    assert [signed_seed(seed) for seed in (0, (1 << 63) - 1, 1 << 63, (1 << 64) - 1, 1 << 64)] == [
        0,
        (1 << 63) - 1,
        -(1 << 63),
        -1,
        0,
    ]
