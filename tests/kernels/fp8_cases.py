"""Checks of FP8 planes, shared by interpreted tests on a CPU and compiled tests on a GPU."""

from __future__ import annotations

import torch
from invariant_cases import TOLERANCE, Histories

from outrider.kernels._dispatch import Backend, force_backend
from outrider.kernels.kv_compact import kv_compact
from outrider.kernels.kv_store import kv_store
from outrider.kernels.tree_attention import tree_attention

FP8 = torch.float8_e4m3fn


def check_store(device: str, dtype: torch.dtype) -> None:
    """Check that both versions round alike, saturate with the right sign, and skip rows without a slot."""
    k = (torch.randn(3, 2, 16, generator=torch.Generator().manual_seed(0)) * 300).to(device, dtype)
    found = []
    for backend in Backend:
        planes = [torch.zeros(2, 4, 2, 16, device=device).to(FP8) for _ in range(2)]
        with force_backend(backend):
            kv_store(k, k + 1, *planes, torch.tensor([1, -1, 6], device=device))
        found.append([plane.float() for plane in planes])
    for mine, other in zip(*found, strict=True):
        # The interpreter rounds ties differently.
        torch.testing.assert_close(mine, other, rtol=0.13, atol=0.002)
    stored = found[0][0].flatten(0, 1)
    assert float(stored.abs().max()) == 448.0
    torch.testing.assert_close(stored[[1, 6]], k[[0, 2]].float().clamp(-448, 448), rtol=0.07, atol=0.01)
    assert int(stored.count_nonzero(dim=(1, 2)).count_nonzero()) == 2


def check_compact(device: str) -> None:
    """Check that moved rows keep their bits."""
    base = torch.randn(3, 4, 2, 16, generator=torch.Generator().manual_seed(1)).to(device)
    arguments = [
        torch.tensor(rows, dtype=torch.int32, device=device)
        for rows in ([[0, 1, 2]], [3], [[0, 2, 4, -1]], [2])
    ]
    for backend in Backend:
        planes = [base.to(FP8)]
        with force_backend(backend):
            kv_compact(planes, *arguments)
        expected = base.to(FP8).float().flatten(0, 1)
        expected[[4, 5]] = expected[[5, 7]]
        assert torch.equal(planes[0].float().flatten(0, 1), expected)


def check_attention(device: str, dtype: torch.dtype) -> None:
    """Check that both kinds of attention return the same result over FP8 planes and over widened planes."""
    narrow = Histories(device, dtype, 20, 3, plane_dtype=FP8)
    wide = Histories(device, dtype, 20, 3)
    wide.planes = [plane.to(dtype) for plane in narrow.planes]
    masks = torch.tensor([[1], [5], [21]], dtype=torch.int32, device=device)
    lens = [torch.tensor(values, dtype=torch.int32, device=device) for values in ([17], [22], [0, 3])]
    for backend in Backend:
        with force_backend(backend):
            paths = [histories.attend(histories.q[-3:], histories.path()) for histories in (narrow, wide)]
            trees = [
                tree_attention(
                    histories.q[-3:],
                    *histories.planes,
                    histories.table[2:],
                    *lens,
                    masks,
                    scale=0.3,
                    max_query_len=3,
                    max_kv_len=22,
                )
                for histories in (narrow, wide)
            ]
        for mine, expected in (paths, trees, (paths[0], trees[0])):
            torch.testing.assert_close(
                mine.float(), expected.float(), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype]
            )
