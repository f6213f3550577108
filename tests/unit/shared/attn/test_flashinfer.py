"""Tests of the FlashInfer backend: its plans, and the models that it rejects.

A fake library computes attention from the plan alone.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from outrider.shared.attn import flashinfer
from outrider.shared.attn.base import AttentionBatch, build_batch
from outrider.shared.attn.flashinfer import FlashInferAttention
from outrider.shared.attn.reference import TorchAttention
from outrider.shared.base.errors import ConfigurationError
from outrider.shared.kv.pool import KVPool

HEADS, KV_HEADS, DIM, PAGE = 4, 2, 16, 4


class PlannedAttention:
    """Replaces `BatchPrefillWithPagedKVCacheWrapper`: computes in plain torch from nothing but the plan."""

    plans = 0

    def __init__(self, workspace: torch.Tensor, kv_layout: str, backend: str) -> None:
        assert kv_layout == "NHD"
        assert backend == "fa2"
        assert workspace.dtype is torch.uint8

    def plan(
        self,
        query_start: torch.Tensor,
        page_start: torch.Tensor,
        pages: torch.Tensor,
        last: torch.Tensor,
        heads: int,
        kv_heads: int,
        head_dim: int,
        page_size: int,
        **options: Any,
    ) -> None:
        type(self).plans += 1
        assert (heads, kv_heads, head_dim, page_size) == (HEADS, KV_HEADS, DIM, PAGE)
        assert {tensor.dtype for tensor in (query_start, page_start, pages, last)} == {torch.int32}
        assert options["causal"] == (options["custom_mask"] is None)
        self.lists = [tensor.tolist() for tensor in (query_start, page_start, last)]
        self.pages, self.options = pages.long(), options

    def run(self, q: torch.Tensor, planes: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        (query_start, page_start, last), options = self.lists, self.options
        assert q.dtype is options["q_data_type"]
        assert q.shape[0] == query_start[-1]
        out, taken = torch.zeros_like(q), 0
        for b, tail in enumerate(last):
            rows = slice(query_start[b], query_start[b + 1])
            count, used = rows.stop - rows.start, page_start[b + 1] - page_start[b]
            kv_len = (used - 1) * PAGE + tail
            k, v = (
                plane[self.pages[page_start[b] : page_start[b + 1]]].flatten(0, 1)[:kv_len].float()
                for plane in planes
            )
            if options["custom_mask"] is None:
                position = torch.arange(kv_len - count, kv_len)[:, None]
                visible = torch.arange(kv_len) <= position
                if options["window_left"] >= 0:
                    visible &= torch.arange(kv_len) >= position - options["window_left"]
            else:
                visible = options["custom_mask"][taken : taken + count * kv_len].view(count, kv_len)
                taken += count * kv_len
            scores = (
                torch.einsum("rkgd,tkd->kgrt", q[rows].float().view(count, KV_HEADS, -1, DIM), k)
                * options["sm_scale"]
            )
            if options["logits_soft_cap"]:
                scores = torch.tanh(scores / options["logits_soft_cap"]) * options["logits_soft_cap"]
            weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
            out[rows] = torch.einsum("kgrt,tkd->rkgd", weights, v).reshape(count, HEADS, DIM).to(q.dtype)
        return out


@pytest.fixture
def backend() -> FlashInferAttention:
    """Return a backend that treats the CPU as a GPU."""
    PlannedAttention.plans = 0
    library = SimpleNamespace(BatchPrefillWithPagedKVCacheWrapper=PlannedAttention)
    made = object.__new__(FlashInferAttention)
    cpu = SimpleNamespace(type="cuda")
    with (
        mock.patch.object(flashinfer, "_library", return_value=library),
        mock.patch.object(torch, "device", return_value=cpu),
        mock.patch.object(torch, "empty", return_value=torch.zeros(8, dtype=torch.uint8)),
    ):
        made.__init__("cuda")  # type: ignore[misc]
    return made


def step(tree: bool) -> tuple[KVPool, AttentionBatch, list[torch.Tensor]]:
    """Return two sequences with a history and then three and two rows."""
    pool = KVPool(32, PAGE, 2, KV_HEADS, DIM, torch.bfloat16, "cpu")
    generator = torch.Generator().manual_seed(0)
    for plane in pool.planes():
        plane.copy_(torch.randn(plane.shape, generator=generator))
    leases = [lease for lease in (pool.lease(20), pool.lease(20)) if lease is not None]
    masks = torch.tensor([[1], [3], [5], [1], [3]], dtype=torch.int32) if tree else None
    batch = build_batch(pool, leases, [9, 4], [3, 2], ancestors=masks)
    rows = [
        torch.randn(5, heads, DIM, generator=generator).to(torch.bfloat16)
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    ]
    return pool, batch, rows


@pytest.mark.parametrize(
    ("tree", "window", "softcap"), [(False, 0, 0.0), (False, 5, 0.0), (True, 0, 0.0), (True, 0, 3.0)]
)
def test_the_plan_says_what_every_row_sees(
    backend: FlashInferAttention, tree: bool, window: int, softcap: float
) -> None:
    pool, batch, rows = step(tree)
    reference = TorchAttention()
    reference.plan(batch)
    backend.plan(batch)
    for layer in (0, 1):
        expected = reference.run(layer, *rows, pool, 0.3, window, None, softcap)
        found = backend.run(layer, *rows, pool, 0.3, window, None, softcap)
        torch.testing.assert_close(found.float(), expected.float(), atol=2e-2, rtol=2e-2)
    assert PlannedAttention.plans == 1, "equal layers share a plan"
    backend.plan(batch)
    backend.run(0, *rows, pool, 0.3, window, None, softcap)
    assert PlannedAttention.plans == 2, "a new step needs a new plan"


def test_idle_sequences_are_left_out_and_yield_zeros(backend: FlashInferAttention) -> None:
    pool, batch, rows = step(tree=False)
    batch = replace(
        batch,
        kv_lens=torch.tensor([99, 12, 0, 6], dtype=torch.int32),
        prefix_lens=torch.tensor([99, 9, 0, 5], dtype=torch.int32),
        query_start=torch.tensor([0, 1, 3, 4, 5], dtype=torch.int32),
        table_rows=torch.tensor([-1, 1, 0, 0], dtype=torch.int32),
        slots=torch.full((5,), -1),
        ragged=True,
    )
    reference = TorchAttention()
    for planned in (batch, replace(batch, table_rows=torch.full((4,), -1, dtype=torch.int32))):
        reference.plan(planned)
        backend.plan(planned)
        expected = reference.run(0, *rows, pool, 0.3)
        found = backend.run(0, *rows, pool, 0.3)
        torch.testing.assert_close(found.float(), expected.float(), atol=2e-2, rtol=2e-2)
        assert not bool(found[[0, 3]].any())
        assert bool(found[[1, 2, 4]].any()) == (planned is batch)


def test_what_it_cannot_do_is_refused_by_name(backend: FlashInferAttention) -> None:
    pool, batch, rows = step(tree=True)
    backend.plan(batch)
    with pytest.raises(ConfigurationError, match="sliding windows"):
        backend.run(0, *rows, pool, 0.3, 5)
    with pytest.raises(ConfigurationError, match="sinks"):
        backend.run(0, *rows, pool, 0.3, 0, torch.zeros(HEADS))
    with pytest.raises(ConfigurationError, match="float32"):
        backend.run(0, *(tensor.float() for tensor in rows), pool, 0.3)
    latent = KVPool(4, PAGE, 1, 1, DIM, torch.bfloat16, "cpu", latent=True)
    with pytest.raises(ConfigurationError, match="MLA"):
        backend.run(0, *rows, latent, 0.3)


def test_without_a_gpu_or_the_library_it_says_what_to_do() -> None:
    with pytest.raises(ConfigurationError, match="needs a CUDA device") as caught:
        FlashInferAttention("cpu")
    assert caught.value.field == "attention_backend"
    with (
        mock.patch.dict("sys.modules", {"flashinfer": None}),
        pytest.raises(ConfigurationError, match=r"outrider\[flashinfer\]"),
    ):
        flashinfer._library()
