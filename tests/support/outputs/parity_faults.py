"""Models with random weights, and faults planted into the passes over trees of a `ModelRunner`."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import torch

from outrider.services.target.engine.loop_plan import LoopPlan
from outrider.services.target.model.model_runner import ModelRunner
from outrider.services.target.startup.parity_check import Parity, check_parity
from outrider.shared.attn.base import AttentionBackend, AttentionBatch
from outrider.shared.attn.create import create_backend
from outrider.shared.nn import dummy
from outrider.shared.nn.config.model_config import ModelConfig
from outrider.shared.nn.decoder import Decoder
from outrider.shared.nn.layers.modules import Attention

FIRST_ROW = 1
"""Row of the root of the parity check's tree. Another sequence has the row before."""
NUM_NODES = 13
"""Nodes of the parity check's tree. Its path consists of the even nodes."""
GAIN = 1.28
"""Output size divided by input size of a product, as in the first layer of a random Llama-3.1-8B."""


def random_model(
    seed: int,
    device: torch.device | str,
    dtype: torch.dtype,
    *,
    layers: int = 6,
    hidden: int = 256,
    gain: float = GAIN,
    **overrides: Any,
) -> Decoder:
    """Return a Llama with random weights, whose products enlarge a row `gain` times.

    Args:
        seed: Seed of the weights.
        device: Device of the weights.
        dtype: Type of the weights.
        layers, hidden: Size of the model.
        gain: With a small gain, all tokens get nearly equal attention.
        overrides: Further keys of config.json.
    """
    raw = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // 64,
        "num_key_value_heads": max(1, hidden // 128),
        "vocab_size": 512,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 4096,
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        **overrides,
    }

    def fill(_source: object, name: str, tensor: torch.Tensor) -> None:
        if name.endswith("norm.weight"):
            tensor.fill_(1.0)
            return
        digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
        generator = torch.Generator(tensor.device).manual_seed(int.from_bytes(digest[:7], "little"))
        tensor.normal_(0.0, gain / tensor.shape[-1] ** 0.5, generator=generator)

    with mock.patch.object(dummy.RandomTensors, "_fill", fill):
        return dummy.random_decoder(ModelConfig.parse(raw, source="random"), device, dtype)


def runner_of(
    decoder: Decoder, attention: AttentionBackend | None = None, page_size: int = 16
) -> ModelRunner:
    """Return a runner with a small pool."""
    pool = decoder.make_pool(128 // page_size, page_size)
    kind = "triton" if pool.kv_dtype.itemsize == 1 else "auto"
    return ModelRunner(decoder, pool, attention or create_backend(kind, decoder.device))


def check(runner: ModelRunner, slots: int = 4, **limits: int) -> Parity | None:
    """Run the parity check in the rounds of an engine. `limits` are fields of `LoopPlan`."""
    return check_parity(runner, LoopPlan(**limits).make_step_runner(runner, slots, max_model_len=64))


Fault = Callable[[ModelRunner, ExitStack], None]
"""Changes a runner until the stack is closed."""


@contextmanager
def planted(runner: ModelRunner, fault: Fault) -> Iterator[None]:
    """Plant a fault for the length of the block."""
    with ExitStack() as stack:
        fault(runner, stack)
        yield


def flipped_bit(node: int, column: int) -> Fault:
    """Flip one bit of the tree's mask."""

    def change(batch: AttentionBatch) -> AttentionBatch:
        assert batch.ancestors is not None
        ancestors = batch.ancestors.clone()
        ancestors[FIRST_ROW + node, 0] ^= 1 << column
        return replace(batch, ancestors=ancestors)

    return _on_batch(change)


def _stale_page(batch: AttentionBatch) -> AttentionBatch:
    table = batch.page_table.clone()
    table[:, 0] = 7  # not in use
    return replace(batch, page_table=table)


def _causal(batch: AttentionBatch) -> AttentionBatch:
    return replace(batch, ancestors=None)


def _pages_of_first(batch: AttentionBatch) -> AttentionBatch:
    assert batch.table_rows is not None
    return replace(batch, table_rows=torch.where(batch.table_rows < 0, -1, batch.table_rows[0]))


def _short(batch: AttentionBatch) -> AttentionBatch:
    return replace(batch, kv_lens=(batch.kv_lens - 1).clamp(min=0))


When = Callable[[AttentionBatch], bool]
"""Selects the passes in which a fault is planted."""


def _with_trees(batch: AttentionBatch) -> bool:
    return batch.ancestors is not None


def _of_rounds(batch: AttentionBatch) -> bool:
    return batch.ragged


def _without_trees(batch: AttentionBatch) -> bool:
    return batch.ragged and batch.ancestors is None


def _on_batch(change: Callable[[AttentionBatch], AttentionBatch], when: When = _with_trees) -> Fault:
    def plant(runner: ModelRunner, stack: ExitStack) -> None:
        plan = runner.attention.plan

        def planning(batch: AttentionBatch) -> None:
            plan(change(batch) if when(batch) else batch)

        stack.enter_context(mock.patch.object(runner.attention, "plan", planning))

    return plant


def _on_pass(
    change: Callable[[ModelRunner, ExitStack, torch.Tensor], torch.Tensor], when: When = _with_trees
) -> Fault:
    """Change a pass: `change` takes and returns the positions."""

    def plant(runner: ModelRunner, stack: ExitStack) -> None:
        forward = runner.decoder.forward

        def running(tokens: torch.Tensor, positions: torch.Tensor, *rest: Any) -> Any:
            batch = runner.attention.batch
            assert batch is not None
            with ExitStack() as during:
                if when(batch):
                    positions = change(runner, during, positions)
                return forward(tokens, positions, *rest)

        stack.enter_context(mock.patch.object(runner.decoder, "forward", running))

    return plant


def _doubled_scale(runner: ModelRunner, during: ExitStack, positions: torch.Tensor) -> torch.Tensor:
    for layer in runner.decoder.layers:
        assert isinstance(layer.attention, Attention)
        during.enter_context(mock.patch.object(layer.attention, "scale", 2 * layer.attention.scale))
    return positions


def _swapped_layers(runner: ModelRunner, during: ExitStack, positions: torch.Tensor) -> torch.Tensor:
    layers = runner.decoder.layers
    first, second = layers[len(layers) // 2 - 1 : len(layers) // 2 + 1]
    for part in ("qkv", "o"):
        _swap(during, first.attention, second.attention, part)
    for part in ("gate_up", "down"):
        _swap(during, first.mlp, second.mlp, part)
    return positions


def _swap(during: ExitStack, first: object, second: object, name: str) -> None:
    one, other = getattr(first, name), getattr(second, name)
    during.enter_context(mock.patch.object(first, name, other))
    during.enter_context(mock.patch.object(second, name, one))


def _wrong_position(_runner: ModelRunner, _during: ExitStack, positions: torch.Tensor) -> torch.Tensor:
    positions = positions.clone()
    positions[FIRST_ROW + NUM_NODES - 1] += 1
    return positions


FAULTS: dict[str, Fault] = {
    "a decoy is visible": flipped_bit(12, 9),
    "an early decoy is visible": flipped_bit(4, 1),
    "an ancestor is invisible": flipped_bit(12, 4),
    "the parent is invisible": flipped_bit(12, 10),
    "no mask": _on_batch(_causal),
    "a stale page": _on_batch(_stale_page),
    "doubled attention scale": _on_pass(_doubled_scale),
    "two layers swapped": _on_pass(_swapped_layers),
    "a wrong position": _on_pass(_wrong_position),
    "pages of another sequence": _on_batch(_pages_of_first),
    "the newest token is invisible in rounds without trees": _on_batch(_short, _without_trees),
    "doubled attention scale in all rounds": _on_pass(_doubled_scale, _of_rounds),
    "doubled attention scale in rounds without trees": _on_pass(_doubled_scale, _without_trees),
    "two layers swapped in all rounds": _on_pass(_swapped_layers, _of_rounds),
}
