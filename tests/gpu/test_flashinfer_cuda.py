"""The FlashInfer backend on a CUDA device, where it is installed (`pip install 'outrider[flashinfer]'`): equal to our own kernels."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from outrider.shared.attn.base import build_batch
from outrider.shared.attn.flashinfer import FlashInferAttention
from outrider.shared.attn.triton import KernelAttention
from outrider.shared.base.errors import ConfigurationError
from outrider.shared.kv.pool import KVPool

pytestmark = pytest.mark.gpu

INSTALLED = importlib.util.find_spec("flashinfer") is not None
HEADS, KV_HEADS, DIM, PAGE = 32, 8, 128, 16
STARTS, COUNTS = [700, 0, 37], [64, 5, 1]


def masks(tree: bool) -> torch.Tensor | None:
    """Chains that branch: node i hangs on node i // 2."""
    if not tree:
        return None
    words = []
    for count in COUNTS:
        reach = [1]
        for node in range(1, count):
            reach.append(reach[node // 2 if node > 1 else 0] | 1 << node)
        words += [[(mask >> 32 * word) & 0xFFFFFFFF for word in range(2)] for mask in reach]
    table = torch.tensor(words, dtype=torch.int64)
    return torch.where(table >= 1 << 31, table - (1 << 32), table).to(torch.int32).cuda()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("tree", "window", "softcap"), [(False, 0, 0.0), (True, 0, 0.0), (False, 90, 0.0), (True, 0, 20.0)])
def test_attention_equals_our_own(dtype: torch.dtype, tree: bool, window: int, softcap: float) -> None:
    if not INSTALLED:
        with pytest.raises(ConfigurationError, match="flashinfer"):
            FlashInferAttention("cuda")
        return
    pool = KVPool(80, PAGE, 2, KV_HEADS, DIM, dtype, "cuda")
    generator = torch.Generator("cuda").manual_seed(0)
    for plane in pool.planes():
        plane.normal_(generator=generator)
    leases = [lease for lease in (pool.lease(start + count) for start, count in zip(STARTS, COUNTS, strict=True)) if lease is not None]
    batch = build_batch(pool, leases, STARTS, COUNTS, ancestors=masks(tree))
    q, k, v = (torch.randn(sum(COUNTS), heads, DIM, device="cuda", generator=generator).to(dtype) for heads in (HEADS, KV_HEADS, KV_HEADS))
    ours, theirs = KernelAttention(), FlashInferAttention("cuda")
    for _ in range(2):  # planned anew
        ours.plan(batch)
        theirs.plan(batch)
        for layer in (0, 1):
            expected = ours.run(layer, q, k, v, pool, DIM**-0.5, window, None, softcap)
            found = theirs.run(layer, q, k, v, pool, DIM**-0.5, window, None, softcap)
            torch.testing.assert_close(found.float(), expected.float(), atol=2e-2, rtol=2e-2)
