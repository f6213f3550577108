"""Checks of post_round, shared by interpreted tests on a CPU and compiled tests on a GPU."""

from __future__ import annotations

import torch
from guards import Guards, reference_version, triton_version

from outrider.kernels.post_round import post_round


def check_post_round(device: str, bs: int, columns: int, guards: Guards) -> None:
    """Check that each round is written to the next place of the ring, and that other places do not change."""
    rounds = [
        torch.arange(bs * columns, dtype=torch.int32).view(bs, columns) + 1000 * number for number in range(5)
    ]
    for version in (reference_version, lambda: triton_version(guards)):
        ring = guards.empty((3, bs, columns), torch.int32, torch.device("cpu"))
        if device == "cuda":
            if version is reference_version:
                continue  # only a kernel can write to pinned memory from a GPU
            ring = torch.zeros((3, bs, columns), dtype=torch.int32, pin_memory=True)
        ring.zero_()
        turn = guards.put(torch.zeros(1, dtype=torch.int32, device=device))
        with version():
            for packed in rounds:
                post_round(guards.put(packed.to(device)), ring, turn)
        if device == "cuda":
            torch.cuda.synchronize()
        assert int(turn) == 2
        assert [int(place[0, 0]) for place in ring] == [3000, 4000, 2000]
        assert all(torch.equal(place, rounds[number]) for place, number in zip(ring, (3, 4, 2), strict=True))
