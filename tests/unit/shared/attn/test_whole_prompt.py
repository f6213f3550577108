"""Tests of attention of a padded whole prompt by a library, against our kernel without padding."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.kernels.tile_attention import Recorder

from outrider.shared.attn.base import AttentionBatch, build_batch
from outrider.shared.attn.tiles import TileShape
from outrider.shared.attn.triton import KernelAttention
from outrider.shared.attn.whole_prompt import WholePromptAttention
from outrider.shared.kv.pool import KVPool

ROWS, PAGE, HEADS, KV_HEADS, DIM, SCALE = 16, 4, 4, 2, 8, 0.3


class Prompt:
    """A prompt in a pool of NaN, its rows with and without padding, and random queries, keys and values."""

    def __init__(self, length: int) -> None:
        torch.manual_seed(length)
        self.length = length
        self.pool = KVPool(9, PAGE, 1, KV_HEADS, DIM, torch.float32, "cpu")
        for plane in self.pool.planes():
            plane.fill_(torch.nan)
        lease = self.pool.lease(length)
        assert lease is not None
        lease.pages.reverse()
        self.alone = build_batch(self.pool, [lease], [0], [length])
        self.pages = torch.zeros(ROWS // PAGE, dtype=torch.int32)
        self.pages[: len(lease.pages)] = torch.tensor(lease.pages)
        self.padded: AttentionBatch = replace(
            self.alone,
            query_start=torch.tensor([0, length, ROWS], dtype=torch.int32),
            kv_lens=torch.tensor([length, 0], dtype=torch.int32),
            prefix_lens=torch.zeros(2, dtype=torch.int32),
            slots=torch.cat([self.alone.slots, torch.full((ROWS - length,), -1)]),
            max_query_len=ROWS,
            table_rows=torch.tensor([0, -1], dtype=torch.int32),
            ragged=True,
            host_lens=None,
        )
        self.q = torch.randn(ROWS, HEADS, DIM)
        self.k, self.v = (torch.randn(ROWS, KV_HEADS, DIM) for _ in range(2))

    def compare(self, attend: Recorder, **options: object) -> None:
        """Check the attention of the prompt's rows, which also stores their K/V."""
        count = self.length
        plain, whole = (
            KernelAttention(),
            WholePromptAttention(attend, self.pages, torch.tensor([count], dtype=torch.int32)),
        )
        whole.plan(self.padded)
        found = whole.run(0, self.q, self.k, self.v, self.pool, SCALE, **options)  # type: ignore[arg-type]
        plain.plan(self.alone)
        expected = plain.attend(0, self.q[:count], self.pool, SCALE, **options)  # type: ignore[arg-type]
        assert found.shape == (ROWS, HEADS * DIM)
        torch.testing.assert_close(found[:count], expected, rtol=1e-4, atol=1e-5)
        assert found.isfinite().all(), "padding must not spread leftovers"


@pytest.mark.parametrize("length", [1, 9, 12, 16])
def test_a_padded_prompt_attends_in_one_tile(length: int) -> None:
    attend = Recorder()
    Prompt(length).compare(attend)
    assert attend.shapes == [TileShape(ROWS, ROWS, True)]


@pytest.mark.parametrize("options", [{"window": 5}, {"softcap": 3.0}, {"sinks": torch.zeros(HEADS)}])
def test_windows_sinks_and_caps_attend_by_our_kernel(options: dict[str, object]) -> None:
    attend = Recorder()
    Prompt(11).compare(attend, **options)
    assert not attend.shapes
