"""Tiny random models of every target family, made with transformers' classes, and FP8 and MXFP4 files."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn

from outrider.shared.attn.base import build_batch
from outrider.shared.attn.create import create_backend
from outrider.shared.kv.pool import KVPool
from outrider.shared.nn.decoder import Decoder
from support.models import toy_mtp

VOCAB, LAYERS, WINDOW = 97, 4, 24
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
DEEPSEEK: dict[str, Any] = {
    "num_key_value_heads": 4,
    "moe_intermediate_size": 24,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "kv_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 10,
    "first_k_dense_replace": 1,
}
GPT_OSS: dict[str, Any] = {
    "num_local_experts": 6,
    "num_experts_per_tok": 3,
    "head_dim": 16,
    "sliding_window": WINDOW,
    "intermediate_size": 64,
    "rope_parameters": {**YARN, "truncate": False, "beta_fast": 32.0, "beta_slow": 1.0},
    "swiglu_limit": 1.0,
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "mistral": ("Mistral", {"sliding_window": WINDOW}),
    "mistral-narrow": ("Mistral", {"sliding_window": 4}),  # the trees are deeper than this window
    "mistral-full": ("Mistral", {"sliding_window": None, "head_dim": 24}),
    "qwen2": ("Qwen2", {}),
    "qwen2-tied-yarn": ("Qwen2", {"tie_word_embeddings": True, "rope_parameters": YARN}),
    "qwen2-window": ("Qwen2", {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2}),
    "qwen3": ("Qwen3", {"head_dim": 24}),
    "qwen3-bias": ("Qwen3", {"head_dim": 16, "attention_bias": True}),
    "mimo": ("", {}),  # not in transformers: see PlainMimo
    "mixtral": ("Mixtral", {"num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": WINDOW}),
    "qwen3-moe": (
        "Qwen3Moe",
        {
            "num_experts": 7,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 40,
            "head_dim": 16,
            "mlp_only_layers": [1],
        },
    ),
    "qwen3-moe-normed": (
        "Qwen3Moe",
        {
            "num_experts": 7,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 40,
            "head_dim": 16,
            "norm_topk_prob": True,
        },
    ),
    "gpt-oss": ("GptOss", GPT_OSS),
    "gpt-oss-narrow": ("GptOss", {**GPT_OSS, "sliding_window": 3}),
    "deepseek-v2-lite": (
        "DeepseekV2",
        {**DEEPSEEK, "q_lora_rank": None, "topk_method": "greedy", "n_shared_experts": 2},
    ),
    "deepseek-v2": (
        "DeepseekV2",
        {
            **DEEPSEEK,
            "q_lora_rank": 20,
            "topk_method": "group_limited_greedy",
            "routed_scaling_factor": 1.5,
            "rope_parameters": {**YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
        },
    ),
    "deepseek-v3": (
        "DeepseekV3",
        {**DEEPSEEK, "q_lora_rank": 20, "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.7}},
    ),
}


class PlainMimo(nn.Module):
    """The reference MiMo of `toy_mtp`, with random weights and the call interface of `transformers`."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(11)
            self.model = toy_mtp.Model(LAYERS, 1, VOCAB).requires_grad_(False)
            for parameter in self.model.parameters():
                noise = torch.randn_like(parameter) * 0.2
                parameter.copy_(noise if parameter.dim() > 1 else parameter + noise)

    def forward(self, tokens: torch.Tensor, **_: object) -> SimpleNamespace:
        """Return the logits ``[rows, length, vocab]``."""
        return SimpleNamespace(logits=self.model.lm_head(self.model.hidden(tokens)))

    def save_pretrained(self, path: Path) -> None:
        """Save the model in the published form of MiMo-7B, including its references to code."""
        code = {
            "AutoConfig": "configuration_mimo.MiMoConfig",
            "AutoModelForCausalLM": "modeling_mimo.MiMoForCausalLM",
        }
        toy_mtp.save(self.model, path, auto_map=code, eos_token_id=None)


@functools.cache
def reference(case: str) -> Any:
    """Return a random model of transformers. For MiMo, return the reference of this package.

    Norms, biases, sinks and routing biases are random too.
    """
    if case == "mimo":
        return PlainMimo()
    name, overrides = CASES[case]
    settings: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "initializer_range": 0.2,
        "eos_token_id": None,
        "bos_token_id": None,
        "pad_token_id": None,
        **overrides,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(11)
        model = getattr(transformers, f"{name}ForCausalLM")(
            getattr(transformers, f"{name}Config")(**settings)
        ).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() == 1 or parameter.shape[-1] == 1:
                    parameter.add_(torch.randn_like(parameter) * 0.2)
            for module in model.modules():
                # gpt-oss's experts: transformers before 5.19 ignores the configured limit and uses 7.
                if hasattr(module, "limit"):
                    module.limit = settings["swiglu_limit"]
            for buffer_name, buffer in model.named_buffers():
                if buffer_name.endswith("e_score_correction_bias"):
                    buffer.add_(torch.randn_like(buffer) * 0.2)
            for key, parameter in model.named_parameters():
                if key.endswith(
                    ("router.bias", "experts.gate_up_proj_bias", "experts.down_proj_bias", "sinks")
                ):
                    parameter.add_(torch.randn_like(parameter) * 0.3)
    return model


def save(case: str, folder: Path) -> Path:
    """Save the checkpoint of a case into `folder`, unless it is saved already, and return its path."""
    return save_once(folder / case, lambda: reference(case))


def save_once(path: Path, make: Callable[[], Any]) -> Path:
    """Save the model that `make` returns at `path`, unless this folder exists, and return the path."""
    if not path.is_dir():
        make().save_pretrained(path)
    return path


def store_fp8(
    path: Path, source: Path, block: tuple[int, int], keep: Sequence[str] = ()
) -> dict[str, torch.Tensor]:
    """Write the layers of `source` in FP8, in the format of the DeepSeek-V3 release.

    Tensors whose name contains an entry of `keep` stay as they are.

    Returns:
        Name → weight, with the values that the FP8 file represents.
    """
    tensors = load_file(source / "model.safetensors")
    meant = dict(tensors)
    for name, tensor in list(tensors.items()):
        if (
            tensor.dim() == 2
            and ".layers." in name
            and not any(part in name for part in ("mlp.gate.weight", *keep))
        ):
            rows, columns = (-(-size // step) for size, step in zip(tensor.shape, block, strict=True))
            scales = (
                torch.rand(rows, columns, generator=torch.Generator().manual_seed(len(name))) / 100 + 0.001
            )
            spread = torch.kron(scales, torch.ones(block))[: tensor.shape[0], : tensor.shape[1]]
            tensors[name] = (tensor / spread).clamp(-448, 448).to(torch.float8_e4m3fn)
            tensors[f"{name}_scale_inv"] = scales
            meant[name] = tensors[name].float() * spread
    path.mkdir()
    save_file(tensors, path / "model.safetensors")
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": list(block)}
    (path / "config.json").write_text(json.dumps(config))
    return meant


def random_tokens(seed: int, count: int, vocab_size: int = VOCAB) -> list[int]:
    return torch.randint(vocab_size, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def logits_of(model: nn.Module, tokens: Sequence[int]) -> torch.Tensor:
    """Return the logits of a model of transformers, ``[len(tokens), vocab]``."""
    with torch.no_grad():
        logits: torch.Tensor = model(torch.tensor([list(tokens)]), use_cache=False).logits[0]
    return logits


def reference_logits(case: str, tokens: Sequence[int]) -> torch.Tensor:
    """Return the reference's logits, ``[len(tokens), vocab]``."""
    return logits_of(reference(case), tokens)


def assert_near(got: torch.Tensor, want: torch.Tensor, tolerance: float = 1e-4) -> None:
    """Assert equality within `tolerance` of the largest reference value."""
    assert got.shape == want.shape
    error = float((got - want).abs().max() / want.abs().max())
    assert error <= tolerance, f"relative error {error:.2e}"


class Sequences:
    """Runs rows of several sequences through a decoder, on any attention backend."""

    def __init__(
        self, decoder: Decoder, count: int, *, page_size: int = 4, tokens: int = 112, backend: str = "auto"
    ) -> None:
        self.decoder = decoder
        self.pool: KVPool = decoder.make_pool(count * (-(-tokens // page_size)), page_size)
        self.leases = [
            lease for lease in (self.pool.lease(tokens) for _ in range(count)) if lease is not None
        ]
        self.attention = create_backend(backend, "cpu")

    def run(
        self,
        starts: Sequence[int],
        rows: Sequence[Sequence[int]],
        positions: Sequence[Sequence[int]] | None = None,
        ancestors: torch.Tensor | None = None,
        aux: tuple[int, ...] = (),
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the logits ``[rows, vocab]`` and captured states of all rows."""
        leases = self.leases[: len(starts)]
        self.attention.plan(
            build_batch(self.pool, leases, starts, [len(row) for row in rows], ancestors=ancestors)
        )
        if positions is None:
            positions = [
                list(range(start, start + len(row))) for start, row in zip(starts, rows, strict=True)
            ]
        tokens = torch.tensor([token for row in rows for token in row])
        places = torch.tensor([place for row in positions for place in row])
        output = self.decoder.forward(tokens, places, self.attention, self.pool, aux)
        return self.decoder.logits(output.hidden), output.aux


def pack_mxfp4(path: Path, source: Path) -> None:
    """Write a gpt-oss checkpoint in its release format, with random blocks for the experts of `source`."""
    generator = torch.Generator().manual_seed(3)
    tensors = load_file(source / "model.safetensors")
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, columns, rows = tensors.pop(name).shape
        shape = (experts, rows, columns // 32)
        tensors[f"{name}_blocks"] = torch.randint(256, (*shape, 16), generator=generator, dtype=torch.uint8)
        tensors[f"{name}_scales"] = torch.randint(122, 126, shape, generator=generator, dtype=torch.uint8)
    path.mkdir()
    save_file(tensors, path / "model.safetensors")
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "mxfp4",
        "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"],
    }
    (path / "config.json").write_text(json.dumps(config))
