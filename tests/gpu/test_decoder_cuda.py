"""Tests of the decoder on a GPU: equal to the CPU in fp32, no host waits, capturable in CUDA graphs."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from outrider.shared.attn.base import AttentionBatch, build_batch
from outrider.shared.attn.create import create_backend
from outrider.shared.nn.open import expected_tensors, load_decoder, read_model_config

pytestmark = pytest.mark.gpu

VOCAB = 512
PROMPTS = (37, 1, 90)
NODES = (16, 5, 33)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    raw = {
        "model_type": "llama",
        "vocab_size": VOCAB,
        "hidden_size": 256,
        "intermediate_size": 704,
        "num_hidden_layers": 6,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "rms_norm_eps": 1e-5,
    }
    (folder / "config.json").write_text(json.dumps(raw))
    generator = torch.Generator().manual_seed(0)
    shapes = expected_tensors(read_model_config(folder))
    tensors = {
        name: torch.randn(shape, generator=generator) / shape[-1] ** 0.5
        if len(shape) > 1
        else 1 + 0.1 * torch.randn(shape, generator=generator)
        for name, shape in shapes.items()
    }
    save_file(tensors, folder / "model.safetensors")
    return folder


class Session:
    """Three sequences on one device: first their prompts, then a tree for each."""

    def __init__(self, checkpoint: Path, device: str, dtype: torch.dtype, page_size: int = 16) -> None:
        self.decoder = load_decoder(checkpoint, device=device, dtype=dtype)
        self.pool = self.decoder.make_pool(512 // page_size, page_size)
        self.leases = [
            lease for lease in (self.pool.lease(length + 64) for length in PROMPTS) if lease is not None
        ]
        self.attention = create_backend("auto", device)
        self.device = device

    def batch(
        self, starts: Sequence[int], counts: Sequence[int], ancestors: torch.Tensor | None = None
    ) -> AttentionBatch:
        masks = None if ancestors is None else ancestors.to(self.device)
        return build_batch(self.pool, self.leases, starts, counts, ancestors=masks)

    def run(self, batch: AttentionBatch, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return the logits and captured states of all rows, concatenated."""
        self.attention.plan(batch)
        output = self.decoder.forward(tokens, positions, self.attention, self.pool, (1, 2))
        assert output.aux is not None
        return torch.cat([self.decoder.logits(output.hidden), output.aux.float()], dim=-1)

    def rows(self, numbers: Sequence[int]) -> torch.Tensor:
        return torch.tensor(numbers).to(self.device)


def prompts_and_trees() -> tuple[list[int], list[int], list[int], list[int], torch.Tensor]:
    """Return prompt tokens and positions, node tokens and positions, and the masks of random trees."""
    rng = random.Random(5)
    prompt_positions = [position for length in PROMPTS for position in range(length)]
    node_positions: list[int] = []
    masks: list[list[int]] = []
    for length, nodes in zip(PROMPTS, NODES, strict=True):
        paths: list[list[int]] = [[0]]
        paths += [[] for _ in range(nodes - 1)]
        for node in range(1, nodes):
            paths[node] = [*paths[rng.randrange(max(0, node - 3), node)], node]
        node_positions += [length + len(path) - 1 for path in paths]
        masks += [mask_words_of(path) for path in paths]
    ancestors = torch.tensor(masks, dtype=torch.int32)
    return (
        [rng.randrange(VOCAB) for _ in prompt_positions],
        prompt_positions,
        [rng.randrange(VOCAB) for _ in node_positions],
        node_positions,
        ancestors,
    )


def mask_words_of(path: Sequence[int]) -> list[int]:
    """Return two mask words with the bits of the path's nodes set, as signed 32-bit numbers."""
    words = [sum(1 << (node % 32) for node in path if node // 32 == word) for word in range(2)]
    return [word - (1 << 32) if word >= 1 << 31 else word for word in words]


def results(checkpoint: Path, device: str, dtype: torch.dtype, page_size: int = 16) -> torch.Tensor:
    """Prefill, then verify trees. Return all outputs on the host."""
    session = Session(checkpoint, device, dtype, page_size)
    tokens, positions, nodes, node_positions, ancestors = prompts_and_trees()
    prefill = session.run(session.batch([0] * 3, PROMPTS), session.rows(tokens), session.rows(positions))
    verify = session.run(
        session.batch(PROMPTS, NODES, ancestors), session.rows(nodes), session.rows(node_positions)
    )
    return torch.cat([prefill, verify]).cpu()


@pytest.mark.parametrize("page_size", [1, 5, 16])
def test_fp32_equals_the_cpu(checkpoint: Path, page_size: int) -> None:
    want = results(checkpoint, "cpu", torch.float32)
    got = results(checkpoint, "cuda", torch.float32, page_size)
    assert (got - want).abs().max() / want.abs().max() <= 1e-4


@pytest.mark.parametrize(("dtype", "bound"), [(torch.bfloat16, 0.03), (torch.float16, 0.004)])
def test_half_precision_stays_near_fp32(checkpoint: Path, dtype: torch.dtype, bound: float) -> None:
    want = results(checkpoint, "cpu", torch.float32)
    got = results(checkpoint, "cuda", dtype)
    assert (got - want).abs().mean() / want.abs().mean() <= bound


def test_a_planned_step_never_waits_for_the_device_and_can_be_a_graph(checkpoint: Path) -> None:
    session = Session(checkpoint, "cuda", torch.bfloat16)
    tokens, positions, nodes, node_positions, ancestors = prompts_and_trees()
    session.run(session.batch([0] * 3, PROMPTS), session.rows(tokens), session.rows(positions))
    batch = session.batch(PROMPTS, NODES, ancestors)
    rows, places = session.rows(nodes), session.rows(node_positions)
    eager = session.run(batch, rows, places)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        session.run(batch, rows, places)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    other = torch.tensor([(token + 1) % VOCAB for token in nodes], device="cuda")
    want_other = session.run(batch, other, places)
    static = replace(batch)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = session.run(static, rows, places)
    graph.replay()
    assert torch.equal(captured, eager)
    rows.copy_(other)
    graph.replay()
    assert torch.equal(captured, want_other)
