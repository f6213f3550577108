"""The table of q-k-v products per token: its values, and the room that it needs on a device."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from outrider.shared.nn.layers import token_products as module
from outrider.shared.nn.layers.modules import RMSNorm
from outrider.shared.nn.layers.token_products import table_fits, token_products

GIB = 1 << 30


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_token_has_the_product_of_its_normed_embedding(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CHUNK_ROWS", 8)
    generator = torch.Generator().manual_seed(0)
    embedding, weight = (torch.randn(rows, 12, generator=generator).to(dtype) for rows in (21, 30))
    norm = RMSNorm(torch.randn(6, generator=generator).to(dtype), 1e-5)
    table = token_products(embedding[:, :6].contiguous(), norm, weight[:, 6:])
    assert table is not None
    assert table.dtype is dtype
    torch.testing.assert_close(table, functional.linear(norm(embedding[:, :6]), weight[:, 6:]))


@pytest.mark.parametrize(
    ("nbytes", "free", "total", "expected"),
    [
        (1.5 * GIB, 120 * GIB, 140 * GIB, True),
        (3 * GIB, 120 * GIB, 140 * GIB, False),
        (1.5 * GIB, 20 * GIB, 24 * GIB, False),
        (GIB, GIB, 140 * GIB, False),
        (GIB, 2 * GIB, 140 * GIB, True),
    ],
)
def test_a_table_takes_a_small_share_of_the_device_and_half_of_its_free_memory(
    nbytes: float, free: int, total: int, expected: bool
) -> None:
    assert table_fits(int(nbytes), free, total) is expected
