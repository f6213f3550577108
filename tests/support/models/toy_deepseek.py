"""A tiny DeepSeek-V3 with chained MTP layers, trained in seconds, from transformers' layers.

The model runs whole sequences of one length without a cache, and shares no code with the service. Sources:
the DeepSeek-V3 report (arXiv 2412.19437, section 2.2), and the tensor names of DeepSeek-V3, in which the MTP
layers have the numbers after those of the model's layers.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional

from support.models.toy_mtp import VOCAB

HIDDEN = 48
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": None,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 12,
    "max_position_embeddings": 256,
    "initializer_range": 0.05,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": None,
}


class Joint(nn.Module):
    """The parts of an MTP layer around its decoder layer, with the parameter names of checkpoints."""

    def __init__(self) -> None:
        super().__init__()
        self.enorm, self.hnorm, self.shared_head_norm = (nn.RMSNorm(HIDDEN, eps=1e-6) for _ in range(3))
        self.eh_proj = nn.Linear(2 * HIDDEN, HIDDEN, bias=False)


class Model(nn.Module):
    """A model with a dense and a sparse layer, and MTP layers.

    Args:
        mtp_layers: Number of MTP layers. They are created as additional layers of the model, but the model's
            forward pass does not run them.
    """

    def __init__(self, mtp_layers: int, layers: int = 2) -> None:
        super().__init__()
        config = transformers.DeepseekV3Config(**SIZES, num_hidden_layers=layers + mtp_layers)
        self.base: Any = transformers.DeepseekV3ForCausalLM._from_config(config, attn_implementation="eager")
        self.base.config.num_hidden_layers = self.layers = layers
        self.joints = nn.ModuleList(Joint() for _ in range(mtp_layers))

    def hidden(self, tokens: Tensor) -> Tensor:
        """Return the last hidden states after the final norm, ``[rows, length, hidden]``."""
        states: Tensor = self.base.model(tokens, use_cache=False).last_hidden_state
        return states

    def join(self, index: int, tokens: Tensor, states: Tensor) -> Tensor:
        """Run an MTP layer over ``tokens [rows, length]`` and ``states [rows, length, hidden]``."""
        joint: Any = self.joints[index]
        embedded = self.base.model.embed_tokens(tokens)
        x = joint.eh_proj(torch.cat([joint.enorm(embedded), joint.hnorm(states)], -1))
        rows, length = tokens.shape
        positions = torch.arange(length).expand(rows, -1)
        mask = torch.full((length, length), float("-inf")).triu(1)[None, None]
        angles = self.base.model.rotary_emb(x, positions)
        block = self.base.model.layers[self.layers + index]
        out = block(x, attention_mask=mask, position_ids=positions, position_embeddings=angles)
        normed: Tensor = joint.shared_head_norm(out[0] if isinstance(out, tuple) else out)
        return normed

    def loss(self, tokens: Tensor) -> Tensor:
        """Return the sum of the losses of the model and of each MTP layer."""
        states = self.hidden(tokens)
        total = functional.cross_entropy(
            self.base.lm_head(states[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()
        )
        states = states.detach()
        for index in range(len(self.joints)):
            states = self.join(index, tokens[:, 1 + index :], states[:, :-1])
            logits = functional.linear(states[:, :-1], self.base.lm_head.weight.detach())
            total = total + functional.cross_entropy(logits.flatten(0, 1), tokens[:, 2 + index :].flatten())
        return total

    @torch.no_grad()
    def greedy(self, prompt: Sequence[int], count: int) -> list[int]:
        """Return the `count` tokens that greedy decoding appends."""
        tokens = list(prompt)
        for _ in range(count):
            tokens.append(int(self.base.lm_head(self.hidden(torch.tensor([tokens]))[0, -1]).argmax()))
        return tokens[len(prompt) :]

    @torch.no_grad()
    def draft(
        self, tokens: Sequence[int], depth: int, path: Sequence[int] = ()
    ) -> tuple[list[int], list[float]]:
        """Return a chain of `depth` tokens and their log-probs, as `toy_mtp.Model.draft` does."""
        inputs = states = self.hidden(torch.tensor([list(tokens)]))[:, :-1]
        chain: list[int] = []
        logprobs: list[float] = []
        used = len(self.joints)
        for level in range(depth):
            # A layer reads the states of the previous layer. When the last layer repeats, it reads its own
            # last state one position further.
            inputs = states if level < used else torch.cat([inputs, states[:, -1:]], 1)
            index = min(level, used - 1)
            states = self.join(
                index, torch.tensor([[*tokens, *chain][1 + index : 1 + index + inputs.shape[1]]]), inputs
            )
            known = torch.log_softmax(self.base.lm_head(states[0, -1]), -1)
            chain.append(path[level] if level < len(path) else int(known.argmax()))
            logprobs.append(float(known[chain[-1]]))
        return chain, logprobs


def save(model: Model, path: Path) -> Path:
    """Write config.json and model.safetensors in the format of DeepSeek-V3."""
    model.base.save_pretrained(path)
    file = path / "model.safetensors"
    tensors = load_file(file)
    for index, joint in enumerate(model.joints):
        prefix = f"model.layers.{model.layers + index}."
        tensors |= {
            f"{prefix}{name.replace('shared_head_norm', 'shared_head.norm')}": tensor.detach().clone()
            for name, tensor in joint.state_dict().items()
        }
        tensors[f"{prefix}embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors[f"{prefix}shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    save_file(tensors, file)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": len(model.joints)}))
    return path
