"""A head's layers from fused kernels compute what its layers do; on a CPU by the kernels' references."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from toy_heads import HIDDEN, VOCAB, base_config, eagle3_tensors, eagle_tensors, write_head
from toys import make_toy_target, read_target_tensor

from outrider.services.draft.heads import eagle, eagle3
from outrider.services.draft.heads.registry import load_head
from outrider.shared.attn.base import build_batch
from outrider.shared.attn.create import create_backend
from outrider.shared.kv.pool import KVPool
from outrider.shared.nn import linear

CPU = torch.device("cpu")
ROWS = 70  # more than the skinny products take


def eagle3_config(**changes: Any) -> dict[str, Any]:
    return base_config(architectures=["LlamaForCausalLMEagle3"], draft_vocab_size=24) | changes


HEADS = {
    "eagle": (base_config() | {"bias": True}, eagle_tensors()),
    "eagle, two layers": (base_config(num_hidden_layers=2) | {"bias": True}, eagle_tensors(layers=2, qkv_bias=True)),
    "eagle3": (eagle3_config(), eagle3_tensors()),
    "eagle3, normed residual and output": (eagle3_config(norm_before_residual=True, norm_output=True), eagle3_tensors()),
}


@pytest.mark.parametrize("rows", [1, 7, ROWS])
@pytest.mark.parametrize("kind", HEADS)
def test_fused_layers_equal_the_plain_ones(kind: str, rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "can_pack", lambda _: False)  # fused kernels read the weights themselves
    target = make_toy_target(tmp_path / "target", vocab_size=VOCAB, hidden_size=HIDDEN)
    folder = write_head(tmp_path / "head", *HEADS[kind])
    generator = torch.Generator().manual_seed(rows)
    tokens = torch.randint(0, VOCAB, (rows,), generator=generator, dtype=torch.int32)
    features = torch.randn(rows, HIDDEN, generator=generator)
    source = torch.randperm(rows, generator=generator).to(torch.int32)
    outputs = []
    for fused in (False, True):
        for module in (eagle, eagle3):
            monkeypatch.setattr(module, "runs_fused", lambda *_, fused=fused: fused)
        head = load_head(folder, CPU, torch.float32)
        for name in list(head.missing()):
            head.lend(name, read_target_tensor(target, name))
        pool = KVPool(32, 4, head.num_layers, head.kv_heads, head.head_dim, torch.float32, CPU)
        lease = pool.lease(rows)
        assert lease is not None
        attention = create_backend("triton", CPU)
        with torch.inference_mode():
            attention.plan(build_batch(pool, [lease], [0], [rows]))
            states = head.forward(tokens, features, head.rotation(torch.arange(rows)), attention, pool, source)
            assert (head._fused is not None) == fused  # type: ignore[attr-defined]
            outputs.append((states, head.logits(states), *pool.planes()))
    assert any(bool((want != 0).any()) for want in outputs[0][2:])
    for have, want in zip(outputs[1], outputs[0], strict=True):
        torch.testing.assert_close(have, want, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("kind", HEADS)
def test_the_last_rows_alone_are_what_all_rows_end_with(kind: str, fused: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sequences, count = 3, 4
    monkeypatch.setattr(linear, "can_pack", lambda _: False)
    target = make_toy_target(tmp_path / "target", vocab_size=VOCAB, hidden_size=HIDDEN)
    for module in (eagle, eagle3):
        monkeypatch.setattr(module, "runs_fused", lambda *_: fused)
    head = load_head(write_head(tmp_path / "head", *HEADS[kind]), CPU, torch.float32)
    for name in list(head.missing()):
        head.lend(name, read_target_tensor(target, name))
    generator = torch.Generator().manual_seed(1)
    rows = sequences * count
    tokens = torch.randint(0, VOCAB, (rows,), generator=generator, dtype=torch.int32)
    features = torch.randn(rows, HIDDEN, generator=generator)
    rotation = head.rotation(torch.arange(count).repeat(sequences))
    outputs = []
    for last in (False, True):
        pool = KVPool(32, 4, head.num_layers, head.kv_heads, head.head_dim, torch.float32, CPU)
        leases = [lease for lease in (pool.lease(count) for _ in range(sequences)) if lease is not None]
        attention = create_backend("triton", CPU)
        every = build_batch(pool, leases, [0] * sequences, [count] * sequences)
        ends = replace(every, query_start=torch.arange(sequences + 1, dtype=torch.int32), max_query_len=1)
        with torch.inference_mode():
            attention.plan(every)
            states = head.forward(tokens, features, rotation, attention, pool, None, ends if last else None)
        outputs.append((states if last else states.view(sequences, count, HIDDEN)[:, -1], *pool.planes()))
    for have, want in zip(outputs[1], outputs[0], strict=True):
        torch.testing.assert_close(have, want, atol=2e-4, rtol=1e-4)
