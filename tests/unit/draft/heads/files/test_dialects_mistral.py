"""Loading heads in Mistral's own format, heads under every published architecture name, and FR-Spec heads."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from support.models.head_dialects import assert_computes
from support.models.toy_heads import (
    HIDDEN,
    INNER,
    TARGET_LAYERS,
    VOCAB,
    Maker,
    Tensors,
    base_config,
    eagle3_tensors,
    eagle_tensors,
    write_head,
)

from outrider.services.convert.head import HeadLayout, rewrite_head
from outrider.services.draft.algorithm import Algorithm, identify
from outrider.services.draft.heads.registry import HeadKind, head_kind, load_head
from outrider.services.draft.target_info import TargetInfo
from outrider.services.stack.launch import check_options, free_port
from outrider.services.stack.options import StackOptions
from outrider.shared.base.errors import CheckpointError

CPU = torch.device("cpu")
NATIVE = {
    "self_attn.q_proj": "attention.wq",
    "self_attn.k_proj": "attention.wk",
    "self_attn.v_proj": "attention.wv",
    "self_attn.o_proj": "attention.wo",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.down_proj": "feed_forward.w2",
    "mlp.up_proj": "feed_forward.w3",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
    "fc.": "eagle_linear.",
}
PARAMS = {
    "dim": HIDDEN,
    "n_layers": 2,
    "head_dim": 8,
    "hidden_dim": INNER,
    "n_heads": 4,
    "n_kv_heads": 2,
    "norm_eps": 1e-5,
    "rope_theta": 1e6,
    "vocab_size": VOCAB,
    "tied_embeddings": False,
    "max_position_embeddings": 4096,
}


def mistral_tensors(seed: int = 5) -> Tensors:
    """Return a head over two Mistral layers, by canonical names. q and k rotate adjacent pairs."""
    make = Maker(seed)
    tensors = {"fc.weight": make.matrix(HIDDEN, 2 * HIDDEN), "norm.weight": make.norm()}
    for index in range(2):
        tensors |= make.layer(f"layers.{index}.", HIDDEN, "input_layernorm")
    return tensors


def native(tensors: Tensors) -> Tensors:
    renamed: Tensors = {}
    for name, tensor in tensors.items():
        for ours, theirs in NATIVE.items():
            name = name.replace(ours, theirs)
        renamed[name] = tensor
    return renamed


def quantised(tensors: Tensors) -> tuple[Tensors, Tensors]:
    """Return the tensors of the file in FP8, and the dequantised tensors."""
    stored: Tensors = {}
    worth: Tensors = {}
    for name, tensor in native(tensors).items():
        if tensor.dim() == 1:
            stored[name] = tensor
            continue
        scale = tensor.abs().max() / 448
        stored[name] = (tensor / scale).to(torch.float8_e4m3fn)
        stored[name.replace(".weight", ".qscale_weight")] = scale.reshape(())
        stored[name.replace(".weight", ".qscale_act")] = torch.tensor(0.3)
    for name, original in zip(tensors, native(tensors), strict=True):
        scale = stored.get(original.replace(".weight", ".qscale_weight"))
        worth[name] = stored[original] if scale is None else stored[original].float() * scale
    return stored, worth


def write_native(
    folder: Path, tensors: Tensors, params: Mapping[str, Any] = PARAMS, config: str = "params.json"
) -> Path:
    folder.mkdir(parents=True)
    (folder / config).write_text(json.dumps(params))
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()},
        str(folder / "consolidated.safetensors"),
    )
    return folder


MISTRAL_PLAIN = {"num_hidden_layers": 2, "rope_theta": 1e6, "turns_pairs": True}


def test_a_head_in_mistrals_format_computes_what_the_plain_head_does(tmp_path: Path) -> None:
    tensors = mistral_tensors()
    folder = write_native(tmp_path / "head", native(tensors))
    assert "layers.0.attention.wq.weight" in native(tensors)
    assert identify(folder) is Algorithm.EAGLE
    assert head_kind(folder) is HeadKind.EAGLE
    head = load_head(folder, CPU, torch.float32)
    assert tuple(head.missing()) == ("model.embed_tokens.weight", "lm_head.weight")
    assert head.feature_spec(TargetInfo("t", "f", VOCAB, HIDDEN, TARGET_LAYERS)).final_hidden
    assert_computes(head, tensors, **MISTRAL_PLAIN)


@pytest.mark.parametrize(
    "architecture", ["EagleMistralForCausalLM", "MistralForCausalLMEagle", "MistralForCausalLM"]
)
def test_the_same_tensors_beside_a_config_json_are_read_too(architecture: str, tmp_path: Path) -> None:
    config = base_config(
        architectures=[architecture], model_type="mistral", num_hidden_layers=2, head_dim=8, rope_theta=1e6
    )
    head = load_head(
        write_native(tmp_path / "head", native(mistral_tensors()), config, "config.json"), CPU, torch.float32
    )
    assert_computes(head, mistral_tensors(), **MISTRAL_PLAIN)


def test_a_head_in_fp8_is_widened_by_its_scales(tmp_path: Path) -> None:
    stored, worth = quantised(mistral_tensors())
    params = PARAMS | {"quantization": {"qformat_weight": "fp8_e4m3", "qscheme_act": "TENSOR"}}
    head = load_head(write_native(tmp_path / "head", stored, params), CPU, torch.float32)
    assert_computes(head, worth, **MISTRAL_PLAIN)


def test_yarn_of_params_is_that_of_the_rope(tmp_path: Path) -> None:
    yarn = {
        "factor": 16.0,
        "original_max_position_embeddings": 1024,
        "beta": 4.0,
        "alpha": 1.0,
        "apply_scale": False,
    }
    head = load_head(
        write_native(tmp_path / "head", native(mistral_tensors()), PARAMS | {"yarn": yarn}),
        CPU,
        torch.float32,
    )
    rope = head.config.layer.rope  # type: ignore[attr-defined]
    assert (rope.kind.value, rope.factor, rope.beta_fast, rope.beta_slow, rope.attention_factor) == (
        "yarn",
        16.0,
        4.0,
        1.0,
        1.0,
    )
    assert rope.theta == 1e6


@pytest.mark.parametrize(
    ("params", "field"),
    [
        ({"moe": {"num_experts": 8}}, "moe"),
        ({"kv_lora_rank": 8}, "kv_lora_rank"),
        ({"llama_4_scaling": {"beta": 0.1}}, "llama_4_scaling"),
        ({"quantization": {"qformat_weight": "nvfp4"}}, "quantization"),
        ({"yarn": {"factor": 2.0, "gamma": 1}}, "yarn"),
        ({"n_heads": None}, "num_attention_heads"),
    ],
)
def test_params_that_cannot_be_served_are_refused_by_their_key(
    params: dict[str, Any], field: str, tmp_path: Path
) -> None:
    folder = write_native(tmp_path / "head", native(mistral_tensors()), PARAMS | params)
    with pytest.raises(CheckpointError, match=field) as caught:
        load_head(folder, CPU, torch.float32)
    assert caught.value.field == field
    assert "params.json" in caught.value.message


def test_missing_tensors_are_named_as_mistral_spells_them(tmp_path: Path) -> None:
    tensors = native(mistral_tensors())
    for name in ("layers.0.attention_norm.weight", "layers.1.attention.wk.weight", "norm.weight"):
        folder = write_native(
            tmp_path / name, {key: tensor for key, tensor in tensors.items() if key != name}
        )
        with pytest.raises(CheckpointError, match=name.replace(".", r"\.")) as caught:
            load_head(folder, CPU, torch.float32)
        assert caught.value.field == name
    stored, _ = quantised(mistral_tensors())
    per_row = stored | {"eagle_linear.qscale_weight": torch.ones(HIDDEN)}
    with pytest.raises(CheckpointError, match="Only one scale per tensor") as caught:
        load_head(write_native(tmp_path / "rows", per_row), CPU, torch.float32)
    assert caught.value.field == "eagle_linear.qscale_weight"
    broken = write_native(
        tmp_path / "nan", stored | {"eagle_linear.qscale_weight": torch.tensor(float("nan"))}
    )
    with pytest.raises(CheckpointError, match=r"eagle_linear\.qscale_weight is nan"):
        load_head(broken, CPU, torch.float32)
    stored.pop("eagle_linear.qscale_weight")
    with pytest.raises(CheckpointError, match=r"eagle_linear\.weight is float8_e4m3fn"):
        load_head(write_native(tmp_path / "scales", stored), CPU, torch.float32)


@pytest.mark.parametrize("fp8", [False, True])
def test_a_converted_head_computes_the_same(fp8: bool, tmp_path: Path) -> None:
    stored, worth = quantised(mistral_tensors()) if fp8 else (native(mistral_tensors()), mistral_tensors())
    rewrite_head(write_native(tmp_path / "head", stored), tmp_path / "ours", HeadLayout.OUTRIDER)
    tensors = {
        name: tensor.bfloat16().float() if fp8 and tensor.dim() == 2 else tensor
        for name, tensor in worth.items()
    }
    assert_computes(load_head(tmp_path / "ours", CPU, torch.float32), tensors, **MISTRAL_PLAIN)
    with pytest.raises(CheckpointError, match=r"norm\.weight"):
        rewrite_head(tmp_path / "head", tmp_path / "official", HeadLayout.EAGLE)


def test_a_folder_with_params_is_taken_as_a_draft_by_up(tmp_path: Path) -> None:
    head = write_native(tmp_path / "head", native(mistral_tensors()))
    check_options(StackOptions(draft=head, port=free_port()))


FAMILIES = ("Llama", "Mistral", "Mixtral", "Qwen2", "Qwen3", "Qwen3Moe", "GptOss")


@pytest.mark.parametrize("family", FAMILIES)
def test_architectures_of_every_family_are_known(family: str, tmp_path: Path) -> None:
    for name in (f"{family}ForCausalLMEagle3", f"Eagle3{family}ForCausalLM"):
        folder = write_head(
            tmp_path / name, base_config(architectures=[name], draft_vocab_size=24), eagle3_tensors()
        )
        assert head_kind(folder) is HeadKind.EAGLE3
        assert load_head(folder, CPU, torch.float32).algorithm == "EAGLE3"
    for name in (f"{family}ForCausalLMEagle", f"Eagle{family}ForCausalLM"):
        if "Mistral" in name:
            continue  # Mistral's own format; tested above
        folder = write_head(tmp_path / name, base_config(architectures=[name]), eagle_tensors())
        assert head_kind(folder) is HeadKind.EAGLE
        assert_computes(load_head(folder, CPU, torch.float32), eagle_tensors())


@pytest.mark.parametrize("model_type", ["mistral", "mixtral", "qwen3"])
def test_an_eagle3_head_named_for_its_family_computes_what_the_plain_head_does(
    model_type: str, tmp_path: Path
) -> None:
    name = {"mistral": "Mistral", "mixtral": "Mixtral", "qwen3": "Qwen3"}[model_type]
    tensors = eagle3_tensors(draft_vocab=None)
    if model_type == "qwen3":  # Qwen3's layers apply a norm to each head of q and k
        make = Maker(21)
        tensors |= {f"midlayer.self_attn.{part}_norm.weight": make.norm(8) for part in "qk"}
    config = base_config(architectures=[f"{name}ForCausalLMEagle3"], model_type=model_type, head_dim=8)
    head = load_head(write_head(tmp_path / "head", config, tensors), CPU, torch.float32)
    assert_computes(head, {key.replace("midlayer.", "layers.0."): tensor for key, tensor in tensors.items()})


def test_a_head_that_reads_the_feature_first_is_refused(tmp_path: Path) -> None:
    config = base_config(
        architectures=["Qwen3ForCausalLMEagle3"], model_type="qwen3", swap_h_and_emb=True, draft_vocab_size=24
    )
    with pytest.raises(CheckpointError) as caught:
        load_head(write_head(tmp_path / "head", config, eagle3_tensors()), CPU, torch.float32)
    assert caught.value.field == "swap_h_and_emb"


HOT = torch.tensor([31, 4, 17, 9, 22, 0, 38])


def test_an_eagle2_head_with_frequent_tokens_drafts_these(tmp_path: Path) -> None:
    config = base_config(architectures=["LlamaForCausalLMEagle"], hot_vocab_size=len(HOT))
    head = load_head(
        write_head(tmp_path / "head", config, eagle_tensors() | {"hot_token_id": HOT.int()}),
        CPU,
        torch.float32,
    )
    assert head.vocabulary.target_ids(CPU).tolist() == sorted(HOT.tolist())
    assert_computes(head, eagle_tensors())
    mapped = load_head(write_head(tmp_path / "map", config, eagle_tensors()), CPU, torch.float32, HOT)
    assert mapped.vocabulary.target_ids(CPU).tolist() == sorted(HOT.tolist())
    rewrite_head(tmp_path / "head", tmp_path / "ours", HeadLayout.OUTRIDER)
    assert load_head(tmp_path / "ours", CPU, torch.float32).vocabulary.size == len(HOT)


@pytest.mark.parametrize("cut", [False, True], ids=["whole lm_head", "lm_head of the frequent tokens"])
def test_an_eagle3_head_with_frequent_tokens_keeps_the_order_of_its_rows(cut: bool, tmp_path: Path) -> None:
    tensors = eagle3_tensors(draft_vocab=None)
    whole = tensors["lm_head.weight"]
    config = base_config(architectures=["LlamaForCausalLMEagle3"], hot_vocab_size=len(HOT))
    stored = tensors | {"hot_token_id": HOT} | ({"lm_head.weight": whole[HOT]} if cut else {})
    head = load_head(write_head(tmp_path / "head", config, stored), CPU, torch.float32)
    plain = assert_computes(
        head, {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}
    )
    assert sorted(head.vocabulary.target_ids(CPU).tolist()) == sorted(HOT.tolist())
    assert plain.head.shape[0] == VOCAB


@pytest.mark.parametrize(
    ("config", "tensors", "token_map", "field"),
    [
        ({"hot_vocab_size": 7}, {}, None, "hot_vocab_size"),
        ({"hot_vocab_size": 6}, {"hot_token_id": HOT}, None, "hot_vocab_size"),
        ({"hot_vocab_size": 6}, {}, HOT, "hot_vocab_size"),
        ({}, {"hot_token_id": HOT}, torch.tensor([1, 2]), "speculative_token_map"),
        ({}, {"hot_token_id": torch.tensor([1, 1])}, None, "hot_token_id"),
        ({}, {"hot_token_id": torch.tensor([1, VOCAB])}, None, "hot_token_id"),
        ({}, {"hot_token_id": torch.ones(3)}, None, "hot_token_id"),
    ],
)
def test_frequent_tokens_that_contradict_are_refused(
    config: dict[str, Any], tensors: Tensors, token_map: torch.Tensor | None, field: str, tmp_path: Path
) -> None:
    folder = write_head(tmp_path / "head", base_config(**config), eagle_tensors() | tensors)
    with pytest.raises(CheckpointError) as caught:
        load_head(folder, CPU, torch.float32, token_map)
    assert caught.value.field == field
