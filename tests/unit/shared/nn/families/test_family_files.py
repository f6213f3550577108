"""Published model files per family: config.json, ignored tensors, MXFP4 and FP8, and rejected models."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from structlog.testing import capture_logs
from support.models.family_models import (
    CASES,
    VOCAB,
    Sequences,
    assert_near,
    pack_mxfp4,
    reference,
    save,
    store_fp8,
)
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from outrider.services.doctor.examine import examine
from outrider.services.doctor.finding import Severity
from outrider.services.doctor.pair import Pair
from outrider.shared.base.errors import CheckpointError
from outrider.shared.nn.checkpoint.expert_files import dequantise_mxfp4
from outrider.shared.nn.config.model_config import ModelConfig
from outrider.shared.nn.config.rope_config import RopeKind
from outrider.shared.nn.families.registry import FAMILIES
from outrider.shared.nn.open import expected_tensors, load_decoder, read_model_config
from outrider.shared.spec.algorithm import Algorithm

SIZES: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
}
DEEPSEEK_V3: dict[str, Any] = {
    **SIZES,
    "model_type": "deepseek_v3",
    "architectures": ["DeepseekV3ForCausalLM"],
    "auto_map": {
        "AutoConfig": "configuration_deepseek.DeepseekV3Config",
        "AutoModel": "modeling_deepseek.DeepseekV3Model",
        "AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM",
    },
    "first_k_dense_replace": 1,
    "kv_lora_rank": 24,
    "q_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "moe_intermediate_size": 24,
    "moe_layer_freq": 1,
    "n_group": 4,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_experts_per_tok": 3,
    "num_nextn_predict_layers": 1,
    "topk_group": 2,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "routed_scaling_factor": 2.5,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 64,
        "type": "yarn",
    },
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("families")


def parse(**keys: Any) -> ModelConfig:
    return ModelConfig.parse({**SIZES, **keys}, source="/models/x/config.json")


@pytest.mark.parametrize("case", list(CASES))
def test_every_tensor_is_expected_or_ignored_with_a_reason(case: str, folder: Path) -> None:
    path = save(case, folder)
    stored = set(load_file(path / "model.safetensors"))
    config = read_model_config(path)
    left = stored - set(expected_tensors(config))
    assert set(expected_tensors(config)) <= stored
    assert all(name.startswith("model.mtp_layers.") for name in left)
    assert bool(left) == (case == "mimo")
    assert all(config.ignored.values())


@pytest.mark.parametrize("case", list(CASES))
def test_a_missing_or_unexpected_tensor_is_named(case: str, folder: Path, tmp_path: Path) -> None:
    source = save(case, folder)
    tensors = load_file(source / "model.safetensors")
    gone = sorted(name for name in tensors if ".layers.2." in name)[0]
    shutil.copy(source / "config.json", tmp_path)
    save_file(
        {name: tensor for name, tensor in tensors.items() if name != gone}, tmp_path / "model.safetensors"
    )
    with pytest.raises(CheckpointError, match="1 tensor missing") as caught:
        load_decoder(tmp_path)
    assert caught.value.field == gone
    save_file(tensors | {"model.layers.2.self_attn.extra": torch.ones(3)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"1 tensor unexpected: model\.layers\.2\.self_attn\.extra"):
        load_decoder(tmp_path)


def test_windows_follow_each_familys_keys() -> None:
    assert parse(model_type="mistral", sliding_window=32).windows == (32,) * 4
    assert parse(model_type="mistral", sliding_window=None).windows == (0,) * 4
    published = {"sliding_window": 131072, "max_window_layers": 2}
    assert parse(model_type="qwen2", use_sliding_window=False, **published).windows == (0,) * 4
    assert parse(model_type="qwen2", use_sliding_window=True, **published).windows == (0, 0, 131072, 131072)
    gpt_oss = {"model_type": "gpt_oss", "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16}
    assert parse(**gpt_oss, sliding_window=128).windows == (128, 0, 128, 0)
    kinds = ["full_attention", "sliding_attention", "full_attention", "full_attention"]
    assert parse(**gpt_oss, sliding_window=64, layer_types=kinds).windows == (0, 64, 0, 0)


def test_deepseek_v3_as_published_is_read() -> None:
    config = ModelConfig.parse(DEEPSEEK_V3)
    assert (config.num_kv_heads, config.head_dim, config.rotary_dim) == (1, 32, 8)
    assert config.rope.kind is RopeKind.YARN
    assert config.rope.attention_factor == 1.0
    magnitude = 0.1 * torch.tensor(40.0).log().item() + 1
    assert config.attention_scale == pytest.approx(20**-0.5 * magnitude**2)
    assert config.sparse == (False, True, True, True)
    assert set(config.ignored) == {"*rotary_emb.inv_freq", "model.layers.4.*"}


def test_the_mtp_layer_of_deepseek_is_ignored_but_an_extra_layer_is_not(folder: Path, tmp_path: Path) -> None:
    source = save("deepseek-v3", folder)
    tensors = load_file(source / "model.safetensors")
    shutil.copy(source / "config.json", tmp_path)
    save_file(
        tensors | {"model.layers.4.eh_proj.weight": torch.ones(64, 128)}, tmp_path / "model.safetensors"
    )
    with capture_logs() as logs:
        load_decoder(tmp_path)
    said = [
        (entry["first"], entry["count"], entry["reason"])
        for entry in logs
        if entry["event"] == "tensors ignored"
    ]
    assert said == [
        (
            "model.layers.4.eh_proj.weight",
            1,
            "multi-token prediction layers, used for drafting and not part of the decoder",
        )
    ]
    save_file(
        tensors | {"model.layers.5.eh_proj.weight": torch.ones(64, 128)}, tmp_path / "model.safetensors"
    )
    with pytest.raises(CheckpointError, match=r"unexpected: model\.layers\.5\.eh_proj\.weight"):
        load_decoder(tmp_path)


def test_a_latent_pool_keeps_one_row_per_token(folder: Path) -> None:
    decoder = load_decoder(save("deepseek-v3", folder))
    pool = decoder.make_pool(4, 4, feature_size=6)
    assert pool.bytes_per_token == (4 * (24 + 8) + 6) * 4
    assert len(pool.planes()) == 4 + 1
    assert pool.v_planes == []


def test_mxfp4_experts_equal_transformers_after_dequantising(folder: Path, tmp_path: Path) -> None:
    source = save("gpt-oss", folder)
    pack_mxfp4(tmp_path / "packed", source)
    packed = load_file(tmp_path / "packed" / "model.safetensors")
    model = type(reference("gpt-oss")).from_pretrained(source, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if f"{name}_blocks" in packed:
                parameter.copy_(
                    convert_moe_packed_tensors(
                        packed[f"{name}_blocks"], packed[f"{name}_scales"], dtype=torch.float32
                    )
                )
        tokens = torch.randint(VOCAB, (40,), generator=torch.Generator().manual_seed(0))
        want = model(tokens[None], use_cache=False).logits[0]
    got, _ = Sequences(load_decoder(tmp_path / "packed"), 1).run([0], [tokens.tolist()])
    assert_near(got, want)


def test_an_mxfp4_scale_that_is_nan_is_refused(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "packed"
    pack_mxfp4(path, save("gpt-oss", folder))
    tensors = load_file(path / "model.safetensors")
    name = "model.layers.2.mlp.experts.down_proj_scales"
    tensors[name].view(-1)[-1] = 255
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(CheckpointError, match=f"{name} contains NaN") as caught:
        load_decoder(path)
    assert caught.value.field == name
    report = examine(Pair(path, None, Algorithm.AUTO, torch.device("cpu"), torch.float32))
    (refused,) = [finding for finding in report.findings if finding.severity is Severity.REFUSED]
    assert (refused.field, refused.message) == (name, caught.value.message)


def test_mxfp4_values_are_exact_in_bf16() -> None:
    blocks = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16)
    scales = torch.linspace(100, 150, 16).to(torch.uint8).view(1, 1, 16)
    exact = dequantise_mxfp4(blocks, scales, torch.float32)
    assert torch.equal(dequantise_mxfp4(blocks, scales, torch.bfloat16).float(), exact)
    scale = 2.0 ** (float(scales[0, 0, 0]) - 127)
    assert exact[0, 0, :8].tolist() == [value * scale for value in (0.0, 0.0, 0.5, 0.0, 1.0, 0.0, 1.5, 0.0)]
    assert exact[0, 0, 16].item() == 0.0
    assert exact[0, 0, 22:24].tolist() == [-1.5 * scale, 0.0]


def test_mxfp4_blocks_must_be_bytes(folder: Path, tmp_path: Path) -> None:
    pack_mxfp4(tmp_path / "packed", save("gpt-oss", folder))
    file = tmp_path / "packed" / "model.safetensors"
    name = "model.layers.1.mlp.experts.down_proj_blocks"
    tensors = load_file(file)
    save_file(tensors | {name: tensors[name].to(torch.int32)}, file)
    with pytest.raises(CheckpointError, match="of a type that is not uint8") as caught:
        load_decoder(tmp_path / "packed")
    assert caught.value.field == name


@pytest.mark.parametrize("case", ["deepseek-v3", "qwen3", "qwen3-moe"])
def test_fp8_checkpoints_equal_the_matrices_that_they_stand_for(
    case: str, folder: Path, tmp_path: Path
) -> None:
    source = save(case, folder)
    meant = store_fp8(tmp_path / "fp8", source, (16, 24))
    (tmp_path / "wide").mkdir()
    shutil.copy(source / "config.json", tmp_path / "wide")
    save_file(meant, tmp_path / "wide" / "model.safetensors")
    tokens = torch.randint(VOCAB, (30,), generator=torch.Generator().manual_seed(0)).tolist()
    got, want = (
        Sequences(load_decoder(tmp_path / name), 1).run([0], [tokens])[0] for name in ("fp8", "wide")
    )
    assert_near(got, want, 1e-6)


def test_fp8_scales_that_are_missing_are_named(folder: Path, tmp_path: Path) -> None:
    store_fp8(tmp_path / "fp8", save("qwen3", folder), (16, 24))
    file, name = tmp_path / "fp8" / "model.safetensors", "model.layers.3.mlp.up_proj.weight_scale_inv"
    tensors = load_file(file)
    save_file({key: tensor for key, tensor in tensors.items() if key != name}, file)
    with pytest.raises(CheckpointError, match="1 tensor missing") as caught:
        load_decoder(tmp_path / "fp8")
    assert caught.value.field == name


@pytest.mark.parametrize(
    ("keys", "field", "says"),
    [
        (
            {"model_type": "gpt_neo"},
            "model_type",
            "'gpt_neo' is not supported; serve a model of one of these types: llama, mistral",
        ),
        ({"model_type": "mamba2"}, "model_type", "linear-attention .* cannot be verified as a tree; serve"),
        (
            {"model_type": "qwen3_next", "layer_types": ["linear_attention"] * 4},
            "model_type",
            "linear-attention",
        ),
        ({"model_type": "novel", "layer_types": ["linear_attention"] * 4}, "model_type", "linear-attention"),
        ({"model_type": "t5", "is_encoder_decoder": True}, "model_type", "encoder-decoder model"),
        ({"model_type": "whisper"}, "model_type", "encoder-decoder model"),
        ({"model_type": "bert"}, "model_type", "generates no text"),
        (
            {"model_type": "novel", "auto_map": {"AutoModel": "modeling_novel.X"}},
            "model_type",
            "auto_map names is never run",
        ),
        ({"architectures": ["NovelForCausalLM"]}, "model_type", "'NovelForCausalLM' is not supported"),
        ({"model_type": "qwen2", "auto_map": {"AutoModel": "modeling_qwen.X"}}, "auto_map", "never run"),
        (
            {"model_type": "mimo", "auto_map": {"AutoModel": "other/repo--modeling_mimo.X"}},
            "auto_map",
            "never run",
        ),
        ({"model_type": "mimo", "auto_map": "x"}, "auto_map", "class names"),
        (
            {"model_type": "gpt_oss", "quantization_config": {"quant_method": "awq"}},
            "quantization_config",
            r"quantized weights \(awq\)",
        ),
        (
            {"model_type": "qwen2", "quantization_config": {"quant_method": "mxfp4"}},
            "quantization_config",
            "mxfp4",
        ),
        ({"model_type": "mistral", "sliding_window": 0}, "sliding_window", "positive integer"),
        (
            {"model_type": "mistral", "sliding_window": 8, "layer_types": ["sliding_attention"]},
            "layer_types",
            "lists 1 layers",
        ),
        ({"model_type": "mistral", "layer_types": ["sliding_attention"] * 4}, "sliding_window", "is missing"),
        (
            {"model_type": "mistral", "layer_types": ["chunked_attention"] * 4},
            "layer_types",
            "'chunked_attention' is not supported",
        ),
        ({"model_type": "qwen3_moe", "num_experts": 4}, "moe_intermediate_size", "is missing"),
        ({**DEEPSEEK_V3, "scoring_func": "softmax"}, "scoring_func", "'softmax' is not supported"),
        ({**DEEPSEEK_V3, "topk_method": "greedy"}, "topk_method", "'greedy' is not supported"),
        ({**DEEPSEEK_V3, "n_group": 3}, "n_group", "does not divide"),
        ({**DEEPSEEK_V3, "qk_rope_head_dim": 7}, "qk_rope_head_dim", "even"),
        (
            {**DEEPSEEK_V3, "quantization_config": {"quant_method": "fp8"}},
            "quantization_config",
            "need weight_block_size",
        ),
        (
            {"model_type": "llama", "quantization_config": {"quant_method": "fp8"}},
            "quantization_config",
            r"\(fp8\)",
        ),
    ],
)
def test_a_model_of_no_family_is_refused_by_its_key(keys: dict[str, Any], field: str, says: str) -> None:
    with pytest.raises(CheckpointError, match=says) as caught:
        parse(**keys)
    assert caught.value.field == field
    assert "/models/x/config.json" in caught.value.message


def test_heads_and_classifiers_are_refused_as_targets(tmp_path: Path) -> None:
    for architecture in ("LlamaForCausalLMEagle3", "LlamaForSequenceClassification"):
        (tmp_path / "config.json").write_text(
            json.dumps({**SIZES, "model_type": "llama", "architectures": [architecture]})
        )
        with pytest.raises(CheckpointError, match=f"'{architecture}' is not a target model of type llama"):
            read_model_config(tmp_path)


def test_a_family_is_found_by_either_name() -> None:
    assert len({family.model_type for family in FAMILIES}) == len(FAMILIES)
    assert parse(**{**DEEPSEEK_V3, "model_type": "kimi_k2"}).latent == parse(**DEEPSEEK_V3).latent
    assert (
        parse(**{key: value for key, value in DEEPSEEK_V3.items() if key != "model_type"}).model_type
        == "deepseek_v3"
    )
    assert parse(architectures=["Qwen2ForCausalLM"]).model_type == "qwen2"
    assert parse(architectures=["Qwen2ForCausalLM"]).qkv_bias
    assert parse(model_type="qwen2").architecture == "Qwen2ForCausalLM"
