"""Every family equals transformers: logits of prompt chunks, steps and trees; windows; captured states."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from support.models.family_models import (
    CASES,
    LAYERS,
    WINDOW,
    Sequences,
    assert_near,
    random_tokens,
    reference,
    reference_logits,
    save,
)

from outrider.shared.nn.decoder import Decoder
from outrider.shared.nn.layers.experts import SparseMLP
from outrider.shared.nn.layers.rope import RotaryEmbedding
from outrider.shared.nn.open import load_decoder

torch.set_num_threads(1)
BACKENDS = ("reference", "triton")  # without a GPU, "triton" runs the kernels' references


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("families")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", list(CASES))
def test_logits_of_chunks_and_steps_equal_transformers(case: str, backend: str, folder: Path) -> None:
    texts = [random_tokens(seed, 3 * WINDOW + 10) for seed in (1, 2)]
    sequences = Sequences(load_decoder(save(case, folder)), 2, backend=backend)
    cuts = [0, 33, 60, *range(61, len(texts[0]) + 1)]  # a prompt, a chunk longer than the window, then steps
    parts: list[list[torch.Tensor]] = [[], []]
    for start, stop in pairwise(cuts):
        logits, _ = sequences.run([start, start], [text[start:stop] for text in texts])
        for part, rows in zip(parts, logits.split(stop - start), strict=True):
            part.append(rows)
    for text, part in zip(texts, parts, strict=True):
        assert_near(torch.cat(part), reference_logits(case, text))


def random_tree(rng: random.Random, nodes: int, depth: int) -> list[list[int]]:
    """Return the path from the root to each node of a random tree."""
    paths = [[0]]
    for node in range(1, nodes):
        parent = rng.choice([path for path in paths if len(path) <= depth])
        paths.append([*parent, node])
    return paths


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", list(CASES))
def test_tree_rows_equal_a_pass_over_their_own_path(case: str, backend: str, folder: Path) -> None:
    rng = random.Random(5)
    prompts = [random_tokens(seed, length) for seed, length in ((3, 2 * WINDOW + 5), (4, 1), (5, WINDOW - 1))]
    trees = [random_tree(rng, nodes, 5) for nodes in (12, 5, 35)]
    rows = [random_tokens(seed, len(tree)) for seed, tree in zip((6, 7, 8), trees, strict=True)]
    sequences = Sequences(load_decoder(save(case, folder)), 3, backend=backend)
    sequences.run([0] * 3, prompts)
    masks = [
        [sum(1 << (node % 32) for node in path if node // 32 == word) for word in (0, 1)]
        for tree in trees
        for path in tree
    ]
    ancestors = torch.tensor(
        [[word - (1 << 32) if word >> 31 else word for word in words] for words in masks], dtype=torch.int32
    )
    positions = [
        [len(prompt) + len(path) - 1 for path in tree] for prompt, tree in zip(prompts, trees, strict=True)
    ]
    logits, _ = sequences.run([len(prompt) for prompt in prompts], rows, positions, ancestors)
    index = 0
    for prompt, tokens, tree in zip(prompts, rows, trees, strict=True):
        leaves = [path for path in tree if not any(other[:-1] == path for other in tree)]
        for path in leaves:
            want = reference_logits(case, prompt + [tokens[node] for node in path])[-len(path) :]
            assert_near(logits[[index + node for node in path]], want)
        index += len(tree)


@pytest.mark.parametrize("case", list(CASES))
def test_captured_states_are_the_outputs_of_the_named_layers(case: str, folder: Path) -> None:
    tokens, named = random_tokens(9, WINDOW + 20), (0, 2, LAYERS - 1)
    states: dict[int, torch.Tensor] = {}
    layers = reference(case).model.layers

    def keep(index: int) -> Any:
        return lambda _module, _arguments, out: states.update(
            {index: out[0] if isinstance(out, tuple) else out}
        )

    hooks = [layers[index].register_forward_hook(keep(index)) for index in named]
    try:
        reference_logits(case, tokens)
    finally:
        for hook in hooks:
            hook.remove()
    _, aux = Sequences(load_decoder(save(case, folder)), 1).run([0], [tokens], aux=named)
    assert aux is not None
    for index, part in zip(named, aux.chunk(len(named), dim=-1), strict=True):
        assert_near(part, states[index].view(len(tokens), -1), 1e-5)


def wider_window(decoder: Decoder) -> None:
    for layer in decoder.layers:
        layer.attention.window += bool(layer.attention.window)  # type: ignore[attr-defined]


def no_sinks(decoder: Decoder) -> None:
    for layer in decoder.layers:
        layer.attention.sinks = None  # type: ignore[attr-defined]


def no_head_norm(decoder: Decoder) -> None:
    for layer in decoder.layers:
        layer.attention.head_norm = None  # type: ignore[attr-defined]


def no_bias(decoder: Decoder) -> None:
    for layer in decoder.layers:
        layer.attention.qkv.bias = None  # type: ignore[attr-defined]


def plain_rope(decoder: Decoder) -> None:
    rope = replace(decoder.config.rope, attention_factor=1.0)
    decoder.rotary = RotaryEmbedding(rope, decoder.config.rotary_dim, "cpu", torch.float32)


def no_temperature(decoder: Decoder) -> None:
    for layer in decoder.layers:
        layer.attention.scale /= decoder.config.rope.softmax_factor  # type: ignore[attr-defined]


def routing(**change: Any) -> Callable[[Decoder], None]:
    def mutate(decoder: Decoder) -> None:
        for layer in decoder.layers:
            if isinstance(layer.mlp, SparseMLP):
                layer.mlp.router.routing = replace(layer.mlp.router.routing, **change)

    return mutate


def no_choice_bias(decoder: Decoder) -> None:
    for layer in decoder.layers:
        if isinstance(layer.mlp, SparseMLP):
            layer.mlp.router.choice_bias = None


def no_router_bias(decoder: Decoder) -> None:
    for layer in decoder.layers:
        layer.mlp.router.bias = None  # type: ignore[attr-defined]


def no_shared_expert(decoder: Decoder) -> None:
    for layer in decoder.layers:
        if isinstance(layer.mlp, SparseMLP):
            layer.mlp.shared = None


def no_expert_bias(decoder: Decoder) -> None:
    for layer in decoder.layers:
        layer.mlp.weights = layer.mlp.weights._replace(down_bias=None)  # type: ignore[attr-defined]


def loose_clamp(decoder: Decoder) -> None:
    for layer in decoder.layers:
        layer.mlp._limit = 1e9  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("case", "mutate"),
    [
        ("mistral", wider_window),
        ("qwen2-window", wider_window),
        ("mixtral", wider_window),
        ("gpt-oss", wider_window),
        ("gpt-oss", no_sinks),
        ("gpt-oss", plain_rope),
        ("gpt-oss", no_router_bias),
        ("gpt-oss", no_expert_bias),
        ("gpt-oss", loose_clamp),
        ("qwen2", no_bias),
        ("mimo", no_bias),
        ("qwen2-tied-yarn", plain_rope),
        ("qwen3", no_head_norm),
        ("qwen3-moe", routing(normalise=True)),
        ("qwen3-moe-normed", routing(normalise=False)),
        ("mixtral", routing(top_k=1)),
        ("deepseek-v2", routing(scale=1.0)),
        ("deepseek-v2", routing(groups=1)),
        ("deepseek-v2", no_temperature),
        ("deepseek-v3", routing(group_top=1)),
        ("deepseek-v3", no_choice_bias),
        ("deepseek-v3", no_shared_expert),
        ("deepseek-v3", no_temperature),
    ],
)
def test_the_comparison_fails_without_the_features_of_a_family(
    case: str, mutate: Callable[[Decoder], None], folder: Path
) -> None:
    """Equality to transformers proves something only if the comparison fails without the feature."""
    tokens = random_tokens(1, 3 * WINDOW)
    decoder = load_decoder(save(case, folder))
    want = reference_logits(case, tokens)
    mutate(decoder)
    got, _ = Sequences(decoder, 1).run([0], [tokens])
    assert float((got - want).abs().max() / want.abs().max()) > 1e-3
    if mutate is wider_window:
        assert_near(got[:WINDOW], want[:WINDOW])
