"""The decoder equals transformers: logits, captured states, prompt chunks, batches and trees."""

from __future__ import annotations

import copy
import functools
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.models.family_models import Sequences, assert_near
from transformers import LlamaConfig, LlamaForCausalLM

from outrider.shared.attn.base import build_batch
from outrider.shared.base.errors import CheckpointError
from outrider.shared.nn.open import expected_tensors, load_decoder

VOCAB, LAYERS, TOLERANCE = 101, 5, 1e-4
LLAMA3: dict[str, Any] = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "multi-head": {"num_key_value_heads": 4},
    "grouped": {},
    "one kv head": {"num_key_value_heads": 1},
    "tied": {"tie_word_embeddings": True},
    "llama3 rope": {"rope_parameters": LLAMA3},
    "linear rope": {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 3.0}},
    "attention bias": {"attention_bias": True},
    "mlp bias": {"mlp_bias": True},
    "wide heads": {"head_dim": 24},
    "narrow heads": {"head_dim": 8},
    "gelu": {"hidden_act": "gelu_pytorch_tanh"},
    "large epsilon": {"rms_norm_eps": 0.1},
}


@functools.cache
def reference(variant: str) -> LlamaForCausalLM:
    """Return a random transformers model whose norms and biases are random too."""
    torch.manual_seed(7)
    settings: dict[str, Any] = {"num_key_value_heads": 2, "initializer_range": 0.2, **VARIANTS[variant]}
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=112,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        max_position_embeddings=64,
        **settings,
    )
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    return model


@functools.cache
def saved(variant: str, folder: Path) -> Path:
    path = folder / variant.replace(" ", "-")
    reference(variant).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.mark.parametrize("variant", list(VARIANTS))
def test_logits_equal_transformers(variant: str, folder: Path) -> None:
    decoder = load_decoder(saved(variant, folder))
    tokens = torch.randint(
        VOCAB, (70,), generator=torch.Generator().manual_seed(1)
    ).tolist()  # beyond max_position_embeddings
    with torch.no_grad():
        want = reference(variant)(torch.tensor([tokens])).logits[0]
    sequences = Sequences(decoder, 1)
    prompt, _ = sequences.run([0], [tokens[:33]])
    chunk, _ = sequences.run([33], [tokens[33:60]])
    steps = [sequences.run([index], [[tokens[index]]])[0] for index in range(60, 70)]
    assert_near(torch.cat([prompt, chunk, *steps]), want)


@pytest.mark.parametrize("variant", ["grouped", "tied"])
def test_captured_states_are_the_outputs_of_the_named_layers(variant: str, folder: Path) -> None:
    tokens = list(range(3, 40))
    states: dict[int, torch.Tensor] = {}
    model = reference(variant)
    hooks = [
        layer.register_forward_hook(
            lambda _m, _a, out, index=index: states.update({index: out[0] if isinstance(out, tuple) else out})
        )
        for index, layer in enumerate(model.model.layers)
    ]
    with torch.no_grad():
        final = model.model(torch.tensor([tokens])).last_hidden_state[0]
    for hook in hooks:
        hook.remove()
    decoder = load_decoder(saved(variant, folder))
    sequences = Sequences(decoder, 1)
    _, aux = sequences.run([0], [tokens], aux=(0, 2, LAYERS - 1))
    assert aux is not None
    want = torch.cat([states[index].view(len(tokens), -1) for index in (0, 2, LAYERS - 1)], dim=-1)
    assert_near(aux, want)
    batch = build_batch(sequences.pool, sequences.leases, [0], [len(tokens)])
    sequences.attention.plan(batch)
    output = decoder.forward(
        torch.tensor(tokens), torch.arange(len(tokens)), sequences.attention, sequences.pool
    )
    assert output.aux is None
    assert_near(output.hidden, final)


def test_sequences_of_a_batch_do_not_see_each_other(folder: Path) -> None:
    decoder = load_decoder(saved("grouped", folder))
    rng = random.Random(3)
    texts = [[rng.randrange(VOCAB) for _ in range(length)] for length in (30, 41, 19, 23)]
    together = Sequences(decoder, 4)
    outs: list[list[torch.Tensor]] = [[] for _ in texts]
    position = [0] * 4
    while any(position[b] < len(texts[b]) for b in range(4)):
        active = [b for b in range(4) if position[b] < len(texts[b])]
        counts = [min(rng.choice([1, 1, 5, 17]), len(texts[b]) - position[b]) for b in active]
        step = Sequences.__new__(Sequences)
        step.__dict__.update(together.__dict__, leases=[together.leases[b] for b in active])
        logits, _ = step.run(
            [position[b] for b in active],
            [texts[b][position[b] : position[b] + n] for b, n in zip(active, counts, strict=True)],
        )
        for b, part, n in zip(active, logits.split(counts), counts, strict=True):
            outs[b].append(part)
            position[b] += n
    for text, parts in zip(texts, outs, strict=True):
        with torch.no_grad():
            want = reference("grouped")(torch.tensor([text])).logits[0]
        assert_near(torch.cat(parts), want)


def random_tree(rng: random.Random, nodes: int, depth: int) -> list[int]:
    """Return the parents of a random tree with branches and the given depth; parents come first."""
    parents, depths = [-1], [0]
    for node in range(1, nodes):
        parent = node - 1 if node <= depth else rng.choice([n for n in range(node) if depths[n] < depth])
        parents.append(parent)
        depths.append(depths[parent] + 1)
    return parents


def path_to(parents: list[int], node: int) -> list[int]:
    path = [node]
    while parents[path[0]] >= 0:
        path.insert(0, parents[path[0]])
    return path


@pytest.mark.parametrize("variant", ["grouped", "llama3 rope"])
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_tree_rows_equal_a_sequential_pass_over_their_own_path(
    variant: str, page_size: int, folder: Path
) -> None:
    decoder = load_decoder(saved(variant, folder))
    rng = random.Random(11)
    prompts = [[rng.randrange(VOCAB) for _ in range(length)] for length in (17, 1, 30)]
    trees = [random_tree(rng, nodes, 5) for nodes in (16, 9, 40)]
    words = 2
    sequences = Sequences(decoder, 3, page_size=page_size)
    sequences.run([0] * 3, prompts)
    rows = [[rng.randrange(VOCAB) for _ in tree] for tree in trees]
    paths = [[path_to(tree, node) for node in range(len(tree))] for tree in trees]
    masks = [[sum(1 << node for node in path) for path in tree_paths] for tree_paths in paths]
    ancestors = torch.tensor(
        [
            [(mask >> (32 * word)) & 0xFFFFFFFF for word in range(words)]
            for tree_masks in masks
            for mask in tree_masks
        ]
    )
    ancestors = torch.where(ancestors >= 1 << 31, ancestors - (1 << 32), ancestors).to(torch.int32)
    positions = [
        [len(prompt) + len(path) - 1 for path in tree_paths]
        for prompt, tree_paths in zip(prompts, paths, strict=True)
    ]
    logits, _ = sequences.run([len(prompt) for prompt in prompts], rows, positions, ancestors)
    row = 0
    for prompt, tokens, tree_paths in zip(prompts, rows, paths, strict=True):
        for path in tree_paths:
            with torch.no_grad():
                want = reference(variant)(torch.tensor([prompt + [tokens[node] for node in path]])).logits[
                    0, -1
                ]
            assert_near(logits[row], want)
            row += 1


def test_sharded_and_bin_checkpoints_give_the_same_decoder(folder: Path, tmp_path: Path) -> None:
    single = saved("grouped", folder)
    model = reference("grouped")
    model.save_pretrained(tmp_path / "sharded", max_shard_size="60KB")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 2
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "config.json").write_bytes((single / "config.json").read_bytes())
    torch.save(model.state_dict(), tmp_path / "bin" / "pytorch_model.bin")
    tokens = list(range(20))
    decoders = [load_decoder(path) for path in (single, tmp_path / "sharded", tmp_path / "bin")]
    outs = [Sequences(decoder, 1).run([0], [tokens])[0] for decoder in decoders]
    assert torch.equal(outs[0], outs[1])
    assert torch.equal(outs[0], outs[2])
    assert len({decoder.fingerprint for decoder in decoders}) == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_runs_and_returns_logits_of_its_type(dtype: torch.dtype, folder: Path) -> None:
    decoder = load_decoder(saved("grouped", folder), dtype=dtype)
    tokens = list(range(24))
    logits, aux = Sequences(decoder, 1).run([0], [tokens], aux=(1,))
    assert logits.dtype is dtype
    assert aux is not None
    assert aux.dtype is dtype
    with torch.no_grad():
        exact = reference("grouped")(torch.tensor([tokens])).logits[0]
        theirs = copy.deepcopy(reference("grouped")).to(dtype)(torch.tensor([tokens])).logits[0]
    assert (logits - exact).abs().mean() <= 1.5 * (
        theirs - exact
    ).abs().mean()  # no worse than transformers at the same precision


def test_stored_half_precision_is_widened_exactly(folder: Path, tmp_path: Path) -> None:
    source = saved("grouped", folder)
    (tmp_path / "config.json").write_bytes((source / "config.json").read_bytes())
    save_file(
        {name: tensor.to(torch.bfloat16) for name, tensor in load_file(source / "model.safetensors").items()},
        tmp_path / "model.safetensors",
    )
    decoder = load_decoder(tmp_path)
    assert decoder.dtype is torch.float32
    model = LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    with torch.no_grad():
        want = model(torch.tensor([list(range(20))])).logits[0]
    assert_near(Sequences(decoder, 1).run([0], [list(range(20))])[0], want)


def test_tied_checkpoints_may_store_the_head_and_rotary_buffers(folder: Path, tmp_path: Path) -> None:
    source = saved("tied", folder)
    tensors = load_file(source / "model.safetensors")
    extra = {
        "lm_head.weight": tensors["model.embed_tokens.weight"].clone(),
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8),
    }
    (tmp_path / "config.json").write_bytes((source / "config.json").read_bytes())
    save_file(tensors | extra, tmp_path / "model.safetensors")
    decoder = load_decoder(tmp_path)
    assert decoder.lm_head is decoder.embedding
    assert decoder.weight("lm_head.weight") is decoder.embedding
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight cannot be borrowed"):
        decoder.weight("model.norm.weight")


@pytest.mark.parametrize(
    ("change", "field", "says"),
    [
        (
            {"model.layers.3.mlp.up_proj.weight": None},
            "model.layers.3.mlp.up_proj.weight",
            "1 tensor missing: model.layers.3.mlp.up_proj.weight",
        ),
        (
            {"model.layers.5.mlp.up_proj.weight": torch.ones(112, 64)},
            "model.layers.5.mlp.up_proj.weight",
            "1 tensor unexpected",
        ),
        (
            {"model.layers.0.self_attn.k_proj.weight": torch.ones(64, 64)},
            "model.layers.0.self_attn.k_proj.weight",
            r"\[64, 64\], must be \[32, 64\]",
        ),
        (
            {"model.norm.weight": torch.ones(64, dtype=torch.int64)},
            "model.norm.weight",
            "model.norm.weight is int64",
        ),
        (
            {"model.layers.0.self_attn.q_proj.bias": torch.ones(64)},
            "model.layers.0.self_attn.q_proj.bias",
            "1 tensor unexpected",
        ),
        ({"lm_head.weight": None}, "lm_head.weight", "1 tensor missing: lm_head.weight"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused_by_key(
    change: dict[str, torch.Tensor | None], field: str, says: str, folder: Path, tmp_path: Path
) -> None:
    source = saved("grouped", folder)
    tensors = {**load_file(source / "model.safetensors"), **change}
    (tmp_path / "config.json").write_bytes((source / "config.json").read_bytes())
    save_file(
        {name: tensor for name, tensor in tensors.items() if tensor is not None},
        tmp_path / "model.safetensors",
    )
    with pytest.raises(CheckpointError, match=says) as caught:
        load_decoder(tmp_path)
    assert caught.value.field == field
    assert str(tmp_path) in caught.value.message


def test_loading_reports_progress_and_size(folder: Path) -> None:
    path = saved("grouped", folder)
    seen: list[tuple[int, int]] = []
    decoder = load_decoder(path, progress=lambda done, total: seen.append((done, total)))
    total = sum(tensor.nbytes for tensor in load_file(path / "model.safetensors").values())
    assert seen[-1] == (total, total)
    norms = (2 * LAYERS + 1) * 64 * 4
    assert decoder.weight_bytes == total - norms
    assert set(expected_tensors(decoder.config)) == set(load_file(path / "model.safetensors"))


def test_unwritten_memory_never_reaches_the_logits(folder: Path) -> None:
    decoder = load_decoder(saved("grouped", folder))
    clean, dirty = Sequences(decoder, 1), Sequences(decoder, 1)
    for plane in dirty.pool.planes():
        plane.fill_(float("nan"))
    tokens = list(range(10))
    assert torch.equal(clean.run([0], [tokens])[0], dirty.run([0], [tokens])[0])
