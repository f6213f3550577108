"""A head's fused kernels compute the same as its plain layers. On a CPU, the kernels' references run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.models.toy_heads import HIDDEN, VOCAB, base_config, eagle3_tensors, eagle_tensors, write_head
from support.models.toys import make_toy_target, read_target_tensor

from outrider.services.draft.growth.recurrent_head import ONLY_KEYS, Ends
from outrider.services.draft.heads import eagle, eagle3
from outrider.services.draft.heads.registry import load_head
from outrider.shared.attn.base import AttentionBatch, build_batch
from outrider.shared.attn.create import create_backend
from outrider.shared.kv.pool import KVPool
from outrider.shared.nn.layers import linear

CPU = torch.device("cpu")
ROWS = 70  # more than the skinny products support


def eagle3_config(**changes: Any) -> dict[str, Any]:
    return base_config(architectures=["LlamaForCausalLMEagle3"], draft_vocab_size=24) | changes


HEADS = {
    "eagle": (base_config() | {"bias": True}, eagle_tensors()),
    "eagle, two layers": (
        base_config(num_hidden_layers=2) | {"bias": True},
        eagle_tensors(layers=2, qkv_bias=True),
    ),
    "eagle3": (eagle3_config(), eagle3_tensors()),
    "eagle3, normed residual and output": (
        eagle3_config(norm_before_residual=True, norm_output=True),
        eagle3_tensors(),
    ),
}


@pytest.mark.parametrize("tabled", [True, False])
@pytest.mark.parametrize("rows", [1, 7, ROWS])
@pytest.mark.parametrize("kind", HEADS)
def test_fused_layers_equal_the_plain_ones(
    kind: str, rows: int, tabled: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`tabled`: the embedding's share of the first product comes from a table (EAGLE-3)."""
    if not tabled:
        monkeypatch.setattr(eagle3, "embed_tokens", lambda *_, **__: None)
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
        pool = KVPool(64, 4, head.num_layers, head.kv_heads, head.head_dim, torch.float32, CPU)
        lease = pool.lease(2 * rows)
        assert lease is not None
        attention = create_backend("triton", CPU)
        with torch.inference_mode():
            attention.plan(build_batch(pool, [lease], [0], [rows]))
            states = head.forward(
                tokens, features, head.rotation(torch.arange(rows)), attention, pool, source
            )
            assert (head._fused is not None) == fused  # type: ignore[attr-defined]
            assert (getattr(head, "_embedded", None) is not None) == (
                fused and tabled and kind.startswith("eagle3")
            )
            logits = head.logits(states)
            # A second level, whose features are the states of the first.
            attention.plan(build_batch(pool, [lease], [rows], [rows]))
            following = head.forward(
                tokens.flip(0), states, head.rotation(torch.arange(rows, 2 * rows)), attention, pool
            )
            # The last pass's sums of squares must not be used for other states with the same number of rows.
            outputs.append(
                (states, logits, following, head.logits(following), head.logits(states), *pool.planes())
            )
    assert any(bool((want != 0).any()) for want in outputs[0][5:])
    for have, want in zip(outputs[1], outputs[0], strict=True):
        torch.testing.assert_close(have, want, atol=1e-3, rtol=5e-4)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("kind", HEADS)
def test_the_last_rows_alone_are_what_all_rows_end_with(
    kind: str, fused: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = [4, 4, 4]
    every, planes = forward_ends(kind, fused, counts, lambda batch: None, tmp_path, monkeypatch)
    starts = torch.arange(4, dtype=torch.int32)
    last = partial(replace, query_start=starts, max_query_len=1)
    alike, alike_planes = forward_ends(
        kind, fused, counts, lambda batch: Ends(last(batch)), tmp_path, monkeypatch
    )
    index = torch.tensor([3, 7, 11])
    chosen, chosen_planes = forward_ends(
        kind, fused, counts, lambda batch: Ends(last(batch), index), tmp_path, monkeypatch
    )
    none, none_planes = forward_ends(kind, fused, counts, lambda batch: ONLY_KEYS, tmp_path, monkeypatch)
    for states in (alike, chosen):
        torch.testing.assert_close(states, every[index], atol=2e-4, rtol=1e-4)
    assert none.shape == (0, HIDDEN)
    assert any(bool((plane != 0).any()) for plane in planes)
    for other in (alike_planes, chosen_planes, none_planes):
        for have, want in zip(other, planes, strict=True):
            torch.testing.assert_close(have, want, atol=2e-4, rtol=1e-4)


def test_ends_of_unequal_sequences(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counts, index = [2, 5, 1], torch.tensor([1, 6, 7])
    every, _ = forward_ends("eagle3", True, counts, lambda batch: None, tmp_path, monkeypatch)
    starts = torch.arange(4, dtype=torch.int32)
    ends, _ = forward_ends(
        "eagle3",
        True,
        counts,
        lambda batch: Ends(replace(batch, query_start=starts, max_query_len=1), index),
        tmp_path,
        monkeypatch,
    )
    torch.testing.assert_close(ends, every[index], atol=2e-4, rtol=1e-4)


def forward_ends(
    kind: str,
    fused: bool,
    counts: list[int],
    make_ends: Callable[[AttentionBatch], Ends | None],
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return the states and the KV planes after a pass over sequences with `counts` rows."""
    monkeypatch.setattr(linear, "can_pack", lambda _: False)
    target = make_toy_target(folder / "target", vocab_size=VOCAB, hidden_size=HIDDEN)
    for module in (eagle, eagle3):
        monkeypatch.setattr(module, "runs_fused", lambda *_: fused)
    head = load_head(write_head(folder / "head", *HEADS[kind]), CPU, torch.float32)
    for name in list(head.missing()):
        head.lend(name, read_target_tensor(target, name))
    generator = torch.Generator().manual_seed(1)
    rows = sum(counts)
    tokens = torch.randint(0, VOCAB, (rows,), generator=generator, dtype=torch.int32)
    features = torch.randn(rows, HIDDEN, generator=generator)
    pool = KVPool(32, 4, head.num_layers, head.kv_heads, head.head_dim, torch.float32, CPU)
    leases = [lease for lease in map(pool.lease, counts) if lease is not None]
    attention = create_backend("triton", CPU)
    batch = build_batch(pool, leases, [0] * len(counts), counts)
    rotation = head.rotation(torch.cat([torch.arange(count) for count in counts]))
    with torch.inference_mode():
        attention.plan(batch)
        states = head.forward(tokens, features, rotation, attention, pool, None, make_ends(batch))
    return states, pool.planes()
