"""The EAGLE-3 head as a trainable module. Only the trainer uses this module.

The draft service runs heads with `services.draft.heads.eagle3`, and the evaluation runs them with
`train.reference`. The tensors have the same names as in published checkpoints. The forward pass is the
training-time test of the EAGLE-3 paper (Li et al., arXiv 2503.01840).
"""

import json
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from outrider.train.model import MLP, Llama, LlamaShape, TrainableAttention, TrainableRMSNorm, rope_tables
from outrider.train.tokenizer import BOS_ID, END_ID


class MidLayer(nn.Module):
    """The head's decoder layer.

    The input of the attention is the concatenation [norm(embedding); norm(feature)]. The residual connection
    adds the feature before the norm.
    """

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.hidden_norm = TrainableRMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.input_layernorm = TrainableRMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.self_attn = TrainableAttention(shape, 2 * shape.hidden_size)
        self.post_attention_layernorm = TrainableRMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.mlp = MLP(shape)


class TrainableEagle3Head(nn.Module):
    """One-layer draft head with a reduced vocabulary. It uses the target's embedding."""

    def __init__(self, shape: LlamaShape, draft_ids: Tensor) -> None:
        """Build a head with random weights.

        Args:
            shape: Sizes of the head. Its hidden_size must equal the target's.
            draft_ids: [draft_vocab] int64, the draft vocabulary as target token ids in ascending order.
        """
        super().__init__()
        self.shape = replace(shape, num_hidden_layers=1)
        self.fc = nn.Linear(3 * shape.hidden_size, shape.hidden_size, bias=False)
        self.midlayer = MidLayer(shape)
        self.norm = TrainableRMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.lm_head = nn.Linear(shape.hidden_size, len(draft_ids), bias=False)
        self.register_buffer("draft_ids", draft_ids)
        self.draft_ids: Tensor

    def _attend(self, x: Tensor, step: int, steps: list[tuple[Tensor, Tensor]]) -> Tensor:
        """Attend at unrolled step ``step``.

        Each row sees itself and all earlier rows of step 0. In each later step, it sees only its own row.
        """
        attn = self.midlayer.self_attn
        length = x.shape[1]
        cos, sin = rope_tables(
            torch.arange(step, step + length, device=x.device), attn.dim, self.shape.rope_theta
        )
        q, k, v = attn.project(x, cos, sin)
        groups = attn.heads // attn.kv_heads
        steps.append((k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)))
        causal = torch.ones(length, length, dtype=torch.bool, device=x.device).tril()
        scores = (q @ steps[0][0].mT).float().masked_fill(~causal, float("-inf"))
        extra = [(q * key).float().sum(-1, keepdim=True) for key, _ in steps[1:]]
        weights = (torch.cat([scores, *extra], -1) * attn.dim**-0.5).softmax(-1).to(v.dtype)
        out = weights[..., :length] @ steps[0][1]
        for j, (_, value) in enumerate(steps[1:]):
            out = out + weights[..., length + j : length + j + 1] * value
        result: Tensor = attn.o_proj(out.transpose(1, 2).flatten(2))
        return result

    def unroll(self, features: Tensor, embeddings: Tensor, num_steps: int) -> list[Tensor]:
        """Run the training-time test: unroll the head for several steps.

        Args:
            features: [bs, S, 3*hidden]. Row t is the target's state at position t.
            embeddings: [bs, S + num_steps - 1, hidden]. Row t is the embedding of token x_{t+1}.
            num_steps: Number of unrolled steps. Each step after the first reads the head's own features of
                the previous step.

        Returns:
            The logits [bs, S, draft_vocab] of each step. Row t of step i predicts x_{t+2+i}.
        """
        length = features.shape[1]
        layer = self.midlayer
        h = self.fc(features)
        steps: list[tuple[Tensor, Tensor]] = []
        logits = []
        for i in range(num_steps):
            e = embeddings[:, i : i + length].to(h.dtype)
            x = torch.cat((layer.input_layernorm(e), layer.hidden_norm(h)), -1)
            h = h + self._attend(x, i, steps)
            h = h + layer.mlp(layer.post_attention_layernorm(h))
            logits.append(self.lm_head(self.norm(h)))
        return logits


def save_head(head: TrainableEagle3Head, target: Llama, directory: Path) -> None:
    """Write config.json and model.safetensors in the published EAGLE-3 layout."""
    directory.mkdir(parents=True, exist_ok=True)
    s, vocab = head.shape, target.shape.vocab_size
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": s.hidden_size,
        "intermediate_size": s.intermediate_size,
        "num_attention_heads": s.num_attention_heads,
        "num_key_value_heads": s.num_key_value_heads,
        "head_dim": s.head_dim,
        "num_hidden_layers": 1,
        "vocab_size": vocab,
        "draft_vocab_size": len(head.draft_ids),
        "target_hidden_size": target.shape.hidden_size,
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": list(target.shape.aux_layer_ids()),
            "use_aux_hidden_state": True,
        },
        "rope_theta": s.rope_theta,
        "rms_norm_eps": s.rms_norm_eps,
        "hidden_act": "silu",
        "max_position_embeddings": s.max_position_embeddings,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": BOS_ID,
        "eos_token_id": END_ID,
        "pad_token_id": BOS_ID,
    }
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    state = {
        k: v.detach().to("cpu", torch.bfloat16).contiguous()
        for k, v in head.state_dict().items()
        if k != "draft_ids"
    }
    ids = head.draft_ids.cpu()
    state["d2t"] = ids - torch.arange(len(ids))
    state["t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill(0, ids, True)
    save_file(state, str(directory / "model.safetensors"), metadata={"format": "pt"})


def read_trained_head(directory: Path, shape: LlamaShape) -> TrainableEagle3Head:
    """Read a checkpoint written by ``save_head``. The weights are fp32 tensors with bf16 values.

    Args:
        directory: The head's directory.
        shape: Sizes of the target.
    """
    state = load_file(str(directory / "model.safetensors"))
    offsets = state.pop("d2t")
    del state["t2d"]
    head = TrainableEagle3Head(shape, torch.arange(len(offsets)) + offsets)
    head.load_state_dict({**state, "draft_ids": head.draft_ids})
    return head


def soft_loss(logits: Tensor, target: Tensor, mask: Tensor) -> Tensor:
    """Return the mean cross entropy between the head's logits and the target's probabilities.

    Args:
        logits: [bs, S, draft_vocab].
        target: [bs, S, draft_vocab] probabilities of the target.
        mask: [bs, S] fp32. The loss is averaged over the rows where the mask is 1.
    """
    per_row = -(target * F.log_softmax(logits.float(), -1)).sum(-1)
    return (per_row * mask).sum() / mask.sum().clamp_min(1)
