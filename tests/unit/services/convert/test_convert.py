"""`outrider convert head`: converted heads draft the same trees, and unsupported features are refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.models.toys import make_toy_eagle3, make_toy_target
from typer.testing import CliRunner

from outrider.services.cli import commands as cli
from outrider.services.draft.build import build_engine
from outrider.services.draft.sessions.session import Ask, PeerId
from outrider.services.draft.settings import DraftSettings
from outrider.shared.base.errors import CheckpointError, ConfigurationError, OutriderError
from outrider.shared.spec.drafter import Commit, SequenceOpen
from outrider.shared.spec.fence import FNV_OFFSET, Fence, extend_prefix_hash
from outrider.shared.spec.tree import DraftShape

torch.set_num_threads(1)
RUNNER = CliRunner()
VOCAB, HIDDEN, DRAFT_VOCAB = 40, 32, 24
CPU = torch.device("cpu")
ROOT = Path(__file__).parents[4]
Tensors = dict[str, torch.Tensor]
Tree = tuple[list[int], list[int]]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_toy_target(tmp_path_factory.mktemp("target"), vocab_size=VOCAB, hidden_size=HIDDEN)


def make_head(path: Path, target: Path, **options: Any) -> Path:
    """Save a toy head whose attention heads add up to its width, as the official code assumes."""
    return make_toy_eagle3(path, target, **{"head_dim": 8, **options})


def convert(source: Path, destination: Path, to: str = "outrider") -> str:
    """Run the command and return its output. An `OutriderError` of the command is raised here."""
    result = RUNNER.invoke(cli.app, ["convert", "head", str(source), str(destination), "--to", to])
    if isinstance(result.exception, OutriderError):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


def tree_of(head: Path, target: Path, vocab_size: int = VOCAB, hidden_size: int = HIDDEN) -> Tree:
    """Return tokens and parents of the tree that a head drafts after a fixed text with fixed features."""
    generator = torch.Generator().manual_seed(7)
    settings = DraftSettings.load(
        {"draft": head, "target_weights": target, "device": "cpu", "kv_tokens": 1024}
    )
    engine = build_engine(settings, CPU, torch.float32)
    tokens = torch.randint(0, vocab_size, (12,), generator=generator).tolist()
    fence = Fence(0, 1, len(tokens), extend_prefix_hash(FNV_OFFSET, tokens))
    peer = PeerId(3)
    engine.open(peer, SequenceOpen(fence, tokens, seed=0, temperature=0.0))
    engine.add_features(peer, 0, 1, 0, torch.randn(len(tokens) - 1, hidden_size, generator=generator))
    engine.commit(peer, Commit(fence, len(tokens), (), None), Ask(0, DraftShape(5, 4, 24), asked_s=0.0))
    (proposal,) = engine.step().proposals
    return proposal.trees.tokens[0].tolist(), proposal.trees.parents[0].tolist()


def rewrite(head: Path, change: Callable[[Tensors], Tensors], config: dict[str, Any] | None = None) -> None:
    save_file(
        {name: tensor.contiguous() for name, tensor in change(load_file(head / "model.safetensors")).items()},
        head / "model.safetensors",
    )
    if config is not None:
        file = head / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **config}))


def renamed(old: str, new: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {name.replace(old, new): tensor for name, tensor in tensors.items()}


def to_bin(head: Path) -> None:
    torch.save(load_file(head / "model.safetensors"), head / "pytorch_model.bin")
    (head / "model.safetensors").unlink()


def nest(head: Path) -> None:
    """Write the configuration as the speculators library does."""
    rewrite(head, renamed("midlayer.", "layers.0."))
    file = head / "config.json"
    flat = json.loads(file.read_text())
    outer = {name: flat.pop(name) for name in ("draft_vocab_size", "eagle_config")}
    nested = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.3",
        "speculators_config": {"algorithm": "eagle3"},
        "draft_vocab_size": outer["draft_vocab_size"],
        "eagle_aux_hidden_state_layer_ids": outer["eagle_config"]["eagle_aux_hidden_state_layer_ids"],
        "transformer_layer_config": flat,
    }
    file.write_text(json.dumps(nested))


def add_legacy_norms(head: Path) -> None:
    norms = {
        f"aux_norm_{part}.weight": torch.full((HIDDEN,), 1.0 + 0.1 * index)
        for index, part in enumerate(("low", "mid", "high"))
    }
    rewrite(head, lambda tensors: tensors | norms, {"use_aux_norm": True})


DIALECTS: dict[str, Callable[[Path], Any]] = {
    "official": lambda head: None,
    "bin": to_bin,
    "layers.0.": lambda head: rewrite(head, renamed("midlayer.", "layers.0.")),
    "model.layers.0.": lambda head: rewrite(head, renamed("midlayer.", "model.layers.0.")),
    "model. before everything": lambda head: rewrite(
        head, lambda tensors: {f"model.{name}": one for name, one in tensors.items()}
    ),
    "speculators": nest,
    "legacy aux_norm": add_legacy_norms,
    "no t2d": lambda head: rewrite(
        head, lambda tensors: {name: one for name, one in tensors.items() if name != "t2d"}
    ),
    "a rotary base": lambda head: rewrite(
        head, lambda tensors: tensors, {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}
    ),
    "norm_before_residual": lambda head: rewrite(
        head, lambda tensors: tensors, {"norm_before_residual": True}
    ),
    "norm_output": lambda head: rewrite(head, lambda tensors: tensors, {"norm_output": True}),
}
ONLY_OURS = ("legacy aux_norm", "norm_before_residual", "norm_output")


@pytest.mark.parametrize("dialect", list(DIALECTS))
def test_a_converted_head_drafts_the_same_trees(tmp_path: Path, target: Path, dialect: str) -> None:
    head = make_head(tmp_path / "head", target, draft_vocab_size=DRAFT_VOCAB)
    DIALECTS[dialect](head)
    original = tree_of(head, target)
    convert(head, tmp_path / "ours")
    names = set(load_file(tmp_path / "ours" / "model.safetensors"))
    assert "layers.0.self_attn.q_proj.weight" in names
    assert not any(name.startswith(("midlayer.", "model.", "aux_norm")) for name in names)
    assert tree_of(tmp_path / "ours", target) == original
    if dialect not in ONLY_OURS:
        convert(tmp_path / "ours", tmp_path / "official", "eagle")
        assert tree_of(tmp_path / "official", target) == original


def test_the_dialects_change_the_tree_so_that_the_test_above_can_fail(tmp_path: Path, target: Path) -> None:
    trees = []
    for dialect in ("official", "a rotary base", "norm_before_residual", "norm_output"):
        head = make_head(tmp_path / dialect, target, draft_vocab_size=DRAFT_VOCAB)
        DIALECTS[dialect](head)
        trees.append(tree_of(head, target))
    assert len({str(tree) for tree in trees}) == len(trees)


def test_the_official_layout_is_what_the_official_code_reads(tmp_path: Path, target: Path) -> None:
    """It has the tensors of published heads: `midlayer.*`, d2t as offsets, t2d, no prefix or embedding."""
    head = make_head(
        tmp_path / "head", target, draft_vocab_size=DRAFT_VOCAB, num_heads=2, num_kv_heads=1, head_dim=16
    )
    nest(head)
    convert(head, tmp_path / "official", "eagle")
    attention = [f"midlayer.self_attn.{part}_proj.weight" for part in "qkvo"]
    mlp = [f"midlayer.mlp.{part}_proj.weight" for part in ("gate", "up", "down")]
    norms = [
        f"midlayer.{norm}.weight" for norm in ("hidden_norm", "input_layernorm", "post_attention_layernorm")
    ]
    tensors = load_file(tmp_path / "official" / "model.safetensors")
    assert set(tensors) == {
        "fc.weight",
        "norm.weight",
        "lm_head.weight",
        "d2t",
        "t2d",
        *attention,
        *mlp,
        *norms,
    }
    assert tensors["d2t"].dtype is torch.int64
    assert tensors["t2d"].dtype is torch.bool
    config = json.loads((tmp_path / "official" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["draft_vocab_size"] == DRAFT_VOCAB
    assert config["rope_theta"] == 10000.0
    assert "transformer_layer_config" not in config
    assert "eagle_config" not in config


def test_the_embedded_head_survives_both_ways_bit_by_bit(tmp_path: Path) -> None:
    source = ROOT / "models" / "demo" / "eagle3"
    convert(source, tmp_path / "ours")
    convert(tmp_path / "ours", tmp_path / "back", "eagle")
    before, after = (
        load_file(source / "model.safetensors"),
        load_file(tmp_path / "back" / "model.safetensors"),
    )
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert after[name].dtype == tensor.dtype
        assert torch.equal(after[name], tensor)


def test_target_ids_become_offsets(tmp_path: Path, target: Path) -> None:
    head = make_head(tmp_path / "head", target, draft_vocab_size=DRAFT_VOCAB)
    original = tree_of(head, target)
    rewrite(
        head, lambda tensors: tensors | {"d2t": (tensors["d2t"] + torch.arange(DRAFT_VOCAB)).to(torch.int32)}
    )
    with pytest.raises(CheckpointError, match="d2t"):
        tree_of(head, target)
    assert "d2t contained target ids; written as offsets" in convert(head, tmp_path / "ours")
    assert tree_of(tmp_path / "ours", target) == original


def test_a_full_lm_head_is_cut_to_the_draft_vocabulary(tmp_path: Path, target: Path) -> None:
    head = make_head(tmp_path / "head", target, draft_vocab_size=DRAFT_VOCAB)
    original = tree_of(head, target)

    def widen(tensors: Tensors) -> Tensors:
        full = torch.randn(VOCAB, HIDDEN)
        full[torch.arange(DRAFT_VOCAB) + tensors["d2t"]] = tensors["lm_head.weight"]
        return tensors | {"lm_head.weight": full}

    rewrite(head, widen)
    assert "reduced from 40 rows to the 24 rows" in convert(head, tmp_path / "ours")
    assert tree_of(tmp_path / "ours", target) == original


def test_a_borrowed_lm_head_stays_borrowed(tmp_path: Path, target: Path) -> None:
    head = make_head(tmp_path / "head", target, lm_head="absent")
    file = head / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "draft_vocab_size": None}))
    convert(head, tmp_path / "ours")
    assert json.loads((tmp_path / "ours" / "config.json").read_text())["draft_vocab_size"] is None
    assert tree_of(tmp_path / "ours", target) == tree_of(head, target)
    with pytest.raises(CheckpointError, match="lm_head"):
        convert(head, tmp_path / "official", "eagle")


def make_eagle2(path: Path, *, bias: bool) -> Path:
    """Save a random EAGLE-1/2 head in the published layout."""
    generator = torch.Generator().manual_seed(2)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * 1.5 / shape[-1] ** 0.5

    layer = "layers.0."
    tensors = {
        "fc.weight": random(HIDDEN, 2 * HIDDEN),
        **{f"{layer}self_attn.{part}_proj.weight": random(HIDDEN, HIDDEN) for part in "qkvo"},
        **{f"{layer}mlp.{part}_proj.weight": random(48, HIDDEN) for part in ("gate", "up")},
        f"{layer}mlp.down_proj.weight": random(HIDDEN, 48),
        f"{layer}post_attention_layernorm.weight": 1 + 0.1 * torch.randn(HIDDEN, generator=generator),
    }
    if bias:
        tensors["fc.bias"] = random(HIDDEN)
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": 48,
        "num_attention_heads": 2,
        "num_hidden_layers": 1,
        "vocab_size": VOCAB,
        "rms_norm_eps": 1e-6,
    }
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config if bias else {**config, "bias": False}))
    torch.save(tensors, path / "pytorch_model.bin")
    return path


@pytest.mark.parametrize("bias", [True, False])
def test_eagle_2_heads_are_converted_too(tmp_path: Path, target: Path, bias: bool) -> None:
    head = make_eagle2(tmp_path / "head", bias=bias)
    original = tree_of(head, target)
    for to in ("outrider", "eagle"):
        assert "EAGLE head" in convert(head, tmp_path / to, to)
        assert ("fc.bias" in load_file(tmp_path / to / "model.safetensors")) is bias
        assert tree_of(tmp_path / to, target) == original


UNSUPPORTED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "norm_output": ({}, {"norm_output": True}),
    "norm_before_residual": ({}, {"norm_before_residual": True}),
    "eagle_aux_hidden_state_layer_ids": ({"aux_layers": [0, 2, 5]}, {}),
    "head_dim": ({"head_dim": 16}, {}),
    "rope_scaling": (
        {},
        {
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
}


@pytest.mark.parametrize("key", list(UNSUPPORTED))
def test_what_the_official_code_would_ignore_is_refused_by_key(
    tmp_path: Path, target: Path, key: str
) -> None:
    build, config = UNSUPPORTED[key]
    head = make_head(
        tmp_path / "head", target, draft_vocab_size=DRAFT_VOCAB, config_overrides=config, **build
    )
    with pytest.raises(CheckpointError, match="Use --to outrider") as caught:
        convert(head, tmp_path / "official", "eagle")
    assert caught.value.field == key
    assert not (tmp_path / "official").exists()
    convert(head, tmp_path / "ours")
    assert tree_of(tmp_path / "ours", target) == tree_of(head, target)


def test_wrong_sources_and_destinations_are_named(tmp_path: Path, target: Path) -> None:
    head = make_head(tmp_path / "head", target)
    with pytest.raises(CheckpointError, match="plain model"):
        convert(target, tmp_path / "out")
    with pytest.raises(ConfigurationError, match="not empty"):
        convert(head, head)
    with pytest.raises(ConfigurationError, match="not one of outrider, eagle"):
        convert(head, tmp_path / "out", "medusa")
    with pytest.raises(CheckpointError, match="missing"):
        convert(make_head(tmp_path / "broken", target, drop=("norm.weight",)), tmp_path / "out")
    assert not (tmp_path / "out").exists()
