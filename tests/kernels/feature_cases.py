"""Checks of feature_rows, shared by interpreted tests on a CPU and compiled tests on a GPU."""

from __future__ import annotations

import torch
from guards import Guards, reference_version, triton_version

from outrider.kernels.feature_rows import scatter_rows


def check_scatter_rows(
    device: str, dtype: torch.dtype, count: int, width: int, splits: int, guards: Guards
) -> None:
    """Check both targets. Rows without a target contain NaN, which must not appear anywhere."""
    generator = torch.Generator().manual_seed(count * 100 + width)
    rows = torch.randn(*([splits] if splits else []), count, width, generator=generator)
    targets, indices = [(9, 3), (5, 4)], []
    for one, other in targets:
        index = torch.randperm(one * other, generator=generator)[:count]
        index[torch.rand(count, generator=generator) < 0.4] = -1
        indices.append(index)
    rows[..., (indices[0] < 0) & (indices[1] < 0), :] = torch.nan
    rows = rows.to(device, torch.float32 if splits else dtype)
    indices = [index.to(device) for index in indices]
    expected, actual = (
        [torch.full((*size, width), 7.0, device=device, dtype=dtype) for size in targets] for _ in range(2)
    )
    actual = [guards.put(target) for target in actual]
    with reference_version():
        scatter_rows(rows, indices[0], expected[0], indices[1], expected[1])
    with triton_version(guards):
        slots, places = (guards.put(index) for index in indices)
        scatter_rows(guards.put(rows), slots, actual[0], places, actual[1])
    tolerance = 0.0 if not splits else 1e-6 if dtype is torch.float32 else 2e-2
    for have, want, index in zip(actual, expected, indices, strict=True):
        torch.testing.assert_close(have, want, atol=tolerance, rtol=tolerance)
        written = (have.view(-1, width) != 7.0).any(1).nonzero().flatten().tolist()
        assert written == sorted(place for place in index.tolist() if place >= 0)
        whole = rows.sum(0) if splits else rows
        for row, place in enumerate(index.tolist()):
            if place >= 0:
                near = whole[row].to(dtype)
                torch.testing.assert_close(have.view(-1, width)[place], near, atol=tolerance, rtol=tolerance)
