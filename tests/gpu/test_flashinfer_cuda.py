"""Tests of the FlashInfer backend on a GPU.

Tests that need the library (`pip install 'outrider[flashinfer]'`) are marked `flashinfer`. `make
test-flashinfer` installs the library and runs these tests. `make test-gpu` skips them and prints a note.
"""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from support.drafts.gpu_pair import TARGET, make_pair_drafter
from support.engine.target_harness import generate_plain, make_harness
from support.outputs.near_ties import differences
from support.services.stack import PROMPTS, supervised

from outrider.common.v1 import common_pb2
from outrider.services.target.drafting.no_drafter import NoDrafter
from outrider.shared.attn.base import build_batch
from outrider.shared.attn.create import create_backend
from outrider.shared.attn.flashinfer import FlashInferAttention
from outrider.shared.attn.triton import KernelAttention
from outrider.shared.base.errors import ConfigurationError
from outrider.shared.kv.pool import KVPool
from outrider.shared.nn.open import load_decoder

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

HEADS, KV_HEADS, DIM, PAGE = 32, 8, 128, 16
STARTS, COUNTS = [700, 0, 37], [64, 5, 1]


def masks(tree: bool) -> torch.Tensor | None:
    """Return masks of chains that branch: the parent of node i is node i // 2."""
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


def test_without_the_library_it_says_what_to_install() -> None:
    with (
        mock.patch.dict("sys.modules", {"flashinfer": None}),
        pytest.raises(ConfigurationError, match=r"outrider\[flashinfer\]"),
    ):
        FlashInferAttention("cuda")


@pytest.mark.flashinfer
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("tree", "window", "softcap"), [(False, 0, 0.0), (True, 0, 0.0), (False, 90, 0.0), (True, 0, 20.0)]
)
def test_attention_equals_our_own(dtype: torch.dtype, tree: bool, window: int, softcap: float) -> None:
    pool = KVPool(80, PAGE, 2, KV_HEADS, DIM, dtype, "cuda")
    generator = torch.Generator("cuda").manual_seed(0)
    for plane in pool.planes():
        plane.normal_(generator=generator)
    leases = [
        lease
        for lease in (pool.lease(start + count) for start, count in zip(STARTS, COUNTS, strict=True))
        if lease is not None
    ]
    batch = build_batch(pool, leases, STARTS, COUNTS, ancestors=masks(tree))
    q, k, v = (
        torch.randn(sum(COUNTS), heads, DIM, device="cuda", generator=generator).to(dtype)
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    )
    ours, theirs = KernelAttention(), FlashInferAttention("cuda")
    for _ in range(2):  # The second pass plans again.
        ours.plan(batch)
        theirs.plan(batch)
        for layer in (0, 1):
            expected = ours.run(layer, q, k, v, pool, DIM**-0.5, window, None, softcap)
            found = theirs.run(layer, q, k, v, pool, DIM**-0.5, window, None, softcap)
            torch.testing.assert_close(found.float(), expected.float(), atol=2e-2, rtol=2e-2)


@pytest.mark.flashinfer
@pytest.mark.parametrize("shape", [(5, 1, 6), (5, 4, 16)])
def test_the_engine_writes_what_it_writes_by_our_own(shape: tuple[int, int, int]) -> None:
    """Check texts of a mixed batch with chains and trees: they are equal up to near-ties of bf16."""
    decoder, judge = (load_decoder(TARGET, "cuda", dtype) for dtype in (torch.bfloat16, torch.float32))
    drafter = make_pair_drafter(decoder)
    harness = make_harness(decoder, drafter)
    harness.runner.attention = create_backend("flashinfer", decoder.device)
    prompts = [list(range(7, 7 + length)) for length in (1, 20, 70)]
    for index, prompt in enumerate(prompts):
        harness.submit(prompt, 60, request_id=str(index), shape=shape)
    harness.run()
    for index, prompt in enumerate(prompts):
        plain = generate_plain(decoder, NoDrafter(), prompt, 60)
        for line in differences(
            judge, prompt, plain, harness.sink.tokens[str(index)], f"flashinfer, {shape}, prompt {index}"
        ):
            print(line)
    drafter.shutdown()


@pytest.mark.flashinfer
def test_it_serves_the_embedded_pair() -> None:
    with supervised(
        "--attention-backend", "flashinfer", "--dtype", "bfloat16", "--kv-tokens", "65536", device="cuda"
    ) as stack:
        texts = []
        for mode in (common_pb2.SPECULATION_MODE_ON, common_pb2.SPECULATION_MODE_OFF):
            result = stack.client.chat(PROMPTS[0], mode=mode, max_tokens=64)
            assert result.finished
            texts.append(result.text)
            if mode == common_pb2.SPECULATION_MODE_ON:
                assert result.finished.speculation.accept_length > 2
        print(*texts, sep="\n")
        assert all("capital" in text for text in texts)
        stack.assert_no_page_held()
