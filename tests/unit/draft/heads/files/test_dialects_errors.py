"""Broken heads and token maps are refused with an error that names the key or tensor and the fix."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from support.models.toy_heads import (
    HIDDEN,
    TARGET_LAYERS,
    VOCAB,
    Tensors,
    base_config,
    eagle3_tensors,
    eagle_tensors,
    fc_norms,
    write_head,
)
from support.models.toys import make_toy_target

from outrider.services.draft.build import build_engine
from outrider.services.draft.heads.eagle import EagleHead
from outrider.services.draft.heads.eagle3 import Eagle3Head
from outrider.services.draft.heads.files.token_map import read_token_map
from outrider.services.draft.heads.registry import head_kind, load_head
from outrider.services.draft.settings import DraftSettings
from outrider.services.draft.target_info import TargetInfo
from outrider.shared.base.errors import CheckpointError, ConfigurationError

CPU = torch.device("cpu")
EAGLE = base_config(architectures=["LlamaForCausalLMEagle"])
EAGLE3 = base_config(architectures=["LlamaForCausalLMEagle3"], draft_vocab_size=24)
DEEP = EAGLE3 | {"num_hidden_layers": 2}


def without(tensors: Tensors, *names: str) -> Tensors:
    assert set(names) <= set(tensors)
    return {name: tensor for name, tensor in tensors.items() if name not in names}


BROKEN: dict[str, tuple[Mapping[str, Any], Tensors, str]] = {
    "EAGLE without the bias that its config implies": (EAGLE, eagle_tensors(fc_bias=False), "fc.bias"),
    "EAGLE without fc": (EAGLE, without(eagle_tensors(), "fc.weight"), "fc.weight"),
    "EAGLE with an EAGLE-3 norm": (
        EAGLE,
        eagle_tensors() | {"norm.weight": torch.ones(HIDDEN)},
        "norm.weight",
    ),
    "EAGLE with a norm that layer 0 never has": (
        EAGLE,
        eagle_tensors() | {"layers.0.input_layernorm.weight": torch.ones(HIDDEN)},
        "layers.0.input_layernorm.weight",
    ),
    "EAGLE without the second layer's norm": (
        EAGLE | {"num_hidden_layers": 2},
        without(eagle_tensors(layers=2), "layers.1.input_layernorm.weight"),
        "layers.1.input_layernorm.weight",
    ),
    "EAGLE without the biases of Qwen2": (
        EAGLE | {"qkv_bias": True},
        eagle_tensors(),
        "layers.0.self_attn.q_proj.bias",
    ),
    "EAGLE with one bias of three": (
        EAGLE,
        without(eagle_tensors(qkv_bias=True), "layers.0.self_attn.k_proj.bias"),
        "layers.0.self_attn.k_proj.bias",
    ),
    "EAGLE with a misshaped fc": (
        EAGLE,
        eagle_tensors() | {"fc.weight": torch.zeros(HIDDEN, 3 * HIDDEN)},
        "fc.weight",
    ),
    "EAGLE with another embedding": (
        EAGLE,
        eagle_tensors() | {"embed_tokens.weight": torch.zeros(VOCAB + 1, HIDDEN)},
        "embed_tokens.weight",
    ),
    "EAGLE-3 without its second layer": (DEEP, eagle3_tensors(), "layers.1.post_attention_layernorm.weight"),
    "EAGLE-3 with a second layer too many": (EAGLE3, eagle3_tensors(layers=2), "layers.1.hidden_norm.weight"),
    "EAGLE-3 with a second layer as wide as the first": (
        DEEP,
        eagle3_tensors(layers=2) | {"layers.1.self_attn.v_proj.weight": torch.zeros(16, 2 * HIDDEN)},
        "layers.1.self_attn.v_proj.weight",
    ),
    "EAGLE-3 without the norms of its config": (
        EAGLE3 | {"fc_norm": True},
        eagle3_tensors(),
        "fc_norm.0.weight",
    ),
    "EAGLE-3 with a norm too many": (EAGLE3, eagle3_tensors() | fc_norms(4), "fc_norm.3.weight"),
    "EAGLE-3 without norm_before_fc's norm": (
        EAGLE3 | {"norm_before_fc": True},
        eagle3_tensors(),
        "input_norm.weight",
    ),
    "EAGLE-3 over four layers with fc for three": (
        EAGLE3 | {"eagle_aux_hidden_state_layer_ids": [0, 1, 2, 3]},
        eagle3_tensors(),
        "fc.weight",
    ),
    "EAGLE-3 without the bias of its config": (EAGLE3 | {"bias": True}, eagle3_tensors(), "fc.bias"),
    "EAGLE-3 with integers for weights": (
        EAGLE3,
        eagle3_tensors() | {"norm.weight": torch.ones(HIDDEN, dtype=torch.int32)},
        "norm.weight",
    ),
    "EAGLE-3 with its lm_head for another vocabulary": (
        EAGLE3,
        eagle3_tensors() | {"lm_head.weight": torch.zeros(25, HIDDEN)},
        "lm_head.weight",
    ),
    "EAGLE-3 for a wider target without an embedding": (
        EAGLE3 | {"target_hidden_size": 48},
        eagle3_tensors(target_hidden=48),
        "model.embed_tokens.weight",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_head_is_refused_by_the_name_of_the_tensor(name: str, tmp_path: Path) -> None:
    config, tensors, key = BROKEN[name]
    with pytest.raises(CheckpointError) as caught:
        load_head(write_head(tmp_path / "head", config, tensors), CPU, torch.float32)
    assert key in caught.value.message
    assert caught.value.field == key


def test_a_missing_bias_says_how_a_head_without_one_is_configured(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match='"bias": false to its config'):
        load_head(write_head(tmp_path / "head", EAGLE, eagle_tensors(fc_bias=False)), CPU, torch.float32)


def test_what_is_not_read_is_named_with_the_reason(tmp_path: Path) -> None:
    stored = eagle_tensors() | {
        "lm_head.weight": torch.zeros(VOCAB, HIDDEN),
        "layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4),
    }
    _, keys = EagleHead.load(
        write_head(tmp_path / "eagle", EAGLE | {"bias": False}, stored), CPU, torch.float32
    )
    assert set(keys.ignored) == {"lm_head.weight", "fc.bias", "layers.0.self_attn.rotary_emb.inv_freq"}
    assert '"bias": false' in keys.ignored["fc.bias"]
    config = DEEP | {"draft_vocab_size": None, "fc_norm": False}
    stored = (
        eagle3_tensors(layers=2, draft_vocab=None)
        | fc_norms(3)
        | {"layers.1.input_layernorm.weight": torch.ones(HIDDEN)}
    )
    head, keys = Eagle3Head.load(write_head(tmp_path / "eagle3", config, stored), CPU, torch.float32)
    assert set(keys.ignored) == {"lm_head.weight", "layers.1.input_layernorm.weight", *fc_norms(3)}
    assert "draft_vocab_size is null" in keys.ignored["lm_head.weight"]
    assert "lm_head.weight" in head.missing()


def test_a_plain_model_is_no_head(tmp_path: Path) -> None:
    folder = make_toy_target(tmp_path / "model", vocab_size=VOCAB, hidden_size=HIDDEN, num_layers=2)
    assert head_kind(folder) is None
    with pytest.raises(CheckpointError, match="plain model") as caught:
        load_head(folder, CPU, torch.float32)
    assert caught.value.field == "fc.weight"


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"target_hidden_size": 64}, "target_hidden_size"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"head_dim": 7}, "head_dim"),
        ({"hidden_act": "relu"}, "hidden_act"),
        ({"rope_scaling": {"rope_type": "spiral"}}, "rope_type"),
        ({"bias": "no"}, "bias"),
        ({"vocab_size": None}, "vocab_size"),
    ],
)
def test_a_broken_configuration_is_refused_by_its_key(
    changes: dict[str, Any], key: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError) as caught:
        load_head(write_head(tmp_path / "head", EAGLE | changes, eagle_tensors()), CPU, torch.float32)
    assert caught.value.field == key
    assert key in caught.value.message


@pytest.mark.parametrize(
    ("target", "key"),
    [
        (TargetInfo("t", "f", VOCAB + 8, HIDDEN, TARGET_LAYERS), "vocab_size"),
        (TargetInfo("t", "f", VOCAB, 2 * HIDDEN, TARGET_LAYERS), "hidden_size"),
    ],
)
def test_an_eagle_head_of_another_target_is_refused(target: TargetInfo, key: str, tmp_path: Path) -> None:
    head = load_head(write_head(tmp_path / "head", EAGLE, eagle_tensors()), CPU, torch.float32)
    with pytest.raises(CheckpointError, match="serve the target that this head") as caught:
        head.feature_spec(target)
    assert caught.value.field == key


def test_layers_without_names_are_refused_unless_there_are_three(tmp_path: Path) -> None:
    head = load_head(
        write_head(tmp_path / "head", EAGLE3 | {"num_aux_hidden_states": 4}, eagle3_tensors(num_aux=4)),
        CPU,
        torch.float32,
    )
    with pytest.raises(CheckpointError, match="without naming them") as caught:
        head.feature_spec(TargetInfo("t", "f", VOCAB, HIDDEN, TARGET_LAYERS))
    assert caught.value.field == "eagle_aux_hidden_state_layer_ids"


def write_map(path: Path, content: Any) -> Path:
    if path.suffix == ".json":
        path.write_text(json.dumps(content))
    elif path.suffix == ".safetensors":
        save_file({f"ids{index}": tensor for index, tensor in enumerate(content)}, str(path))
    else:
        torch.save(content, path)
    return path


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.pt", torch.tensor([5, 3, 9])),
        ("b.pt", [5, 3, 9]),
        ("c.pt", {"hot_token_id": torch.tensor([5, 3, 9], dtype=torch.int32)}),
        ("d.safetensors", [torch.tensor([5, 3, 9])]),
        ("e.json", [5, 3, 9]),
        ("f.json", {"token_map": [5, 3, 9]}),
        ("g.json", [5, 3, 5, 9, 3]),
    ],
)
def test_token_maps_of_every_form_are_read(name: str, content: Any, tmp_path: Path) -> None:
    assert read_token_map(write_map(tmp_path / name, content)).tolist() == [5, 3, 9]


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("a.pt", torch.tensor([1.5]), "integers"),
        ("b.json", {"a": [1], "b": [2]}, "2 entries"),
        ("d.json", [3, -1], "negative"),
        ("e.json", [], "no token id"),
        ("f.json", "frequent", "integers"),
        ("g.safetensors", [torch.tensor([[1, 2]])], "integers"),
        ("h.txt", [1], "one of"),
        ("i.pt", Path("code"), "without running code"),
    ],
)
def test_a_token_map_that_is_none_is_refused(name: str, content: Any, problem: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=problem) as caught:
        read_token_map(write_map(tmp_path / name, content))
    assert caught.value.field == "speculative_token_map"


def test_a_token_map_needs_a_head_and_a_vocabulary_that_it_fits(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="does not exist"):
        read_token_map(tmp_path / "none.json")
    eagle = write_head(tmp_path / "eagle", EAGLE, eagle_tensors())
    with pytest.raises(CheckpointError, match="made for this model's tokenizer"):
        load_head(eagle, CPU, torch.float32, torch.tensor([1, VOCAB]))
    with pytest.raises(CheckpointError, match="draft vocabulary of its own") as caught:
        load_head(
            write_head(tmp_path / "eagle3", EAGLE3, eagle3_tensors()),
            CPU,
            torch.float32,
            torch.tensor([1, 2]),
        )
    assert caught.value.field == "speculative_token_map"
    token_map = write_map(tmp_path / "map.json", [1, 2, 3])
    settings = DraftSettings.load(
        {"speculative_algorithm": "NGRAM", "speculative_token_map": token_map, "device": "cpu"}
    )
    with pytest.raises(ConfigurationError, match="NGRAM") as refused:
        build_engine(settings, CPU, torch.float32)
    assert refused.value.field == "speculative_token_map"
