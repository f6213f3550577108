"""The sampling noise in plain Python, without any kernel."""

from __future__ import annotations

import math


def philox(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Return the four words of Philox4x32-10 (Salmon et al. 2011)."""
    (c0, c1, c2, c3), (k0, k1) = counter, key
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & 0xFFFFFFFF, (p0 >> 32) ^ c3 ^ k1, p0 & 0xFFFFFFFF
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return c0, c1, c2, c3


def gumbel(seed: int, position: int, choice: int, token: int) -> float:
    """Return the noise of one token. The seed is unsigned."""
    word = philox((position, token // 4, choice, 0), (seed & 0xFFFFFFFF, seed >> 32))[token % 4]
    return -math.log(-math.log(((word >> 9) + 0.5) * 2.0**-23))
