"""Products computed by torch's library (cuBLAS on CUDA)."""

from __future__ import annotations

import torch

from outrider.kernels.skinny_gemm import reference


def project(x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor | None, splits: int) -> torch.Tensor:
    """Compute `outrider.kernels.skinny_gemm.project` with torch's library.

    If the tile has several splits, the result is a batch of partial products in fp32, which the next kernel
    adds. The library itself would add them in a separate launch, and in the weight's dtype.
    """
    # Scaled weights, uneven shares and strided columns cannot be viewed as a batch: compute one whole
    # product.
    if splits == 1 or scales is not None or x.shape[1] % splits or x.stride(1) != 1:
        return reference.project(x, weight, scales)
    part = x.shape[1] // splits
    rows = x.as_strided((splits, x.shape[0], part), (part, x.stride(0), 1))
    columns = weight.view(-1, splits, part).permute(1, 2, 0)
    if x.is_cuda and x.dtype is not torch.float32:
        return torch.bmm(rows, columns, out_dtype=torch.float32)
    return torch.bmm(rows.float(), columns.float())


def project_halves(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return ``x @ weight.T``, computed as two products, one with each half of the weight's rows."""
    out = torch.empty((x.shape[0], weight.shape[0]), dtype=x.dtype, device=x.device)
    for half, rows in zip(out.chunk(2, dim=1), weight.chunk(2), strict=True):
        torch.mm(x, rows.T, out=half)
    return out
