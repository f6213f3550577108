"""The Llama-family decoder over paged K/V."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn import functional

from outrider.shared.attn.base import AttentionBackend
from outrider.shared.base.errors import CheckpointError, ConfigurationError
from outrider.shared.kv.pool import KVPool
from outrider.shared.nn.config import ModelConfig
from outrider.shared.nn.layers import Attention, DecoderLayer, GatedMLP, Linear, RMSNorm
from outrider.shared.nn.loader import CheckpointReader, Shape
from outrider.shared.nn.rope import RotaryEmbedding

EMBEDDING = "model.embed_tokens.weight"
LM_HEAD = "lm_head.weight"
FINAL_NORM = "model.norm.weight"

Progress = Callable[[int, int], None]
"""Called with (bytes loaded, bytes in all)."""


@dataclass(frozen=True, slots=True)
class DecoderOutput:
    """What a forward pass returns.

    Attributes:
        hidden: ``[rows, hidden_size]`` after the final norm; input of `Decoder.logits`.
        aux: ``[rows, n_aux * hidden_size]``, residual stream after each of the named layers, or None when none was named.
    """

    hidden: torch.Tensor
    aux: torch.Tensor | None


class Decoder:
    """Embedding, decoder layers, final norm and output head. Stateless: K/V lives in the pool that each call is given.

    Attributes:
        config, device, dtype: What was loaded, where, and the type of weights and activations.
        embedding: ``[vocab, hidden]``.
        lm_head: ``[vocab, hidden]``; the same tensor as `embedding` when tied.
        layers, norm, rotary: The parts.
        fingerprint: Identifies configuration and weights.
    """

    def __init__(
        self,
        config: ModelConfig,
        embedding: torch.Tensor,
        layers: Sequence[DecoderLayer],
        norm: RMSNorm,
        lm_head: torch.Tensor,
        fingerprint: str,
    ) -> None:
        self.config = config
        self.device = embedding.device
        self.dtype = embedding.dtype
        self.embedding = embedding
        self.layers = list(layers)
        self.norm = norm
        self.lm_head = lm_head
        self._head = Linear(lm_head)
        self.rotary = RotaryEmbedding(config.rope, config.head_dim, self.device, self.dtype)
        self.fingerprint = fingerprint

    @classmethod
    def load(
        cls,
        path: Path | str,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | None = None,
        progress: Progress | None = None,
    ) -> Decoder:
        """Load a Hugging Face model folder.

        Args:
            path: Holds ``config.json`` and ``*.safetensors`` (or ``pytorch_model*.bin``).
            device: Where the weights go, file by file, without a second copy in host memory.
            dtype: Of weights and activations; None is fp32 on the CPU and bf16 on CUDA.
            progress: Told how many bytes are loaded.

        Raises:
            CheckpointError: Something is missing, unexpected, misshaped, corrupt or unsupported; nothing was allocated then.
            ConfigurationError: The device has not enough memory.
        """
        config = ModelConfig.from_dir(path)
        dtype = dtype or default_dtype(device)
        try:
            return cls._load(path, config, torch.device(device), dtype, progress)
        except torch.OutOfMemoryError as error:
            raise ConfigurationError(
                f"{path} does not fit into the free memory of {device} as {str(dtype).removeprefix('torch.')}; choose another device or a "
                "smaller dtype, or end what else uses it.",
                field="device",
            ) from error

    @classmethod
    def _load(cls, path: Path | str, config: ModelConfig, device: torch.device, dtype: torch.dtype, progress: Progress | None) -> Decoder:
        with CheckpointReader(path, device=device, dtype=dtype, progress=progress) as reader:
            reader.check(expected_tensors(config), ignored=_ignored(config, reader))
            with torch.inference_mode():
                embedding = reader.take(EMBEDDING, (config.vocab_size, config.hidden_size))
                layers = [load_layer(reader, config, f"model.layers.{index}.", index) for index in range(config.num_layers)]
                norm = RMSNorm(reader.take(FINAL_NORM, (config.hidden_size,)), config.rms_norm_eps)
                head = embedding if config.tie_word_embeddings else reader.take(LM_HEAD, (config.vocab_size, config.hidden_size))
            fingerprint = hashlib.sha256(f"{config.fingerprint} {reader.fingerprint}".encode()).hexdigest()
        return cls(config, embedding, layers, norm, head, fingerprint)

    @property
    def weight_bytes(self) -> int:
        """Bytes of embedding, output head and projections (norms are negligible)."""
        linears = [part for layer in self.layers for part in (layer.attention.qkv, layer.attention.o, layer.mlp.gate_up, layer.mlp.down)]
        return self.embedding.nbytes + sum(linear.nbytes for linear in [*linears, self._head])

    def make_pool(self, num_pages: int, page_size: int, feature_size: int = 0) -> KVPool:
        """Make a pool of this decoder's shape on its device."""
        config = self.config
        return KVPool(num_pages, page_size, config.num_layers, config.num_kv_heads, config.head_dim, self.dtype, self.device, feature_size)

    def weight(self, name: str) -> torch.Tensor:
        """Return a weight that a draft may borrow, by its name in the checkpoint: the embedding or the output head.

        Raises:
            CheckpointError: Any other name.
        """
        if name == EMBEDDING:
            return self.embedding
        if name == LM_HEAD:
            return self.lm_head
        raise CheckpointError(f"{name} cannot be borrowed; {EMBEDDING} and {LM_HEAD} can.", field=name)

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the embeddings of ``tokens [rows]``: ``[rows, hidden_size]``."""
        return functional.embedding(tokens, self.embedding)

    @torch.inference_mode()
    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        attention: AttentionBackend,
        pool: KVPool,
        aux_layer_ids: Sequence[int] = (),
    ) -> DecoderOutput:
        """Run all layers over the rows of a planned step.

        Args:
            tokens: ``[rows]``, int32 or int64.
            positions: ``[rows]``, rotary positions (a tree node's is its depth behind the root's).
            attention: `AttentionBackend.plan` was called for exactly these rows.
            pool: Read up to the batch's prefix, written at its slots.
            aux_layer_ids: Layers whose outputs are captured, ascending.
        """
        hidden = self.embed(tokens)
        rotation = self.rotary(positions)
        aux: list[torch.Tensor] = []
        for index, layer in enumerate(self.layers):
            hidden = layer(hidden, rotation, attention, pool)
            if index in aux_layer_ids:
                aux.append(hidden)
        assert len(aux) == len(aux_layer_ids), f"aux layers {aux_layer_ids} of a decoder with {len(self.layers)}"
        return DecoderOutput(hidden=self.norm(hidden), aux=torch.cat(aux, dim=-1) if aux else None)

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return ``[rows, vocab] fp32`` for hidden rows ``[rows, hidden_size]`` after the final norm."""
        return self._head(hidden).float()


def default_dtype(device: torch.device | str) -> torch.dtype:
    """Return what ``dtype auto`` means: bf16 on CUDA, fp32 elsewhere."""
    return torch.bfloat16 if torch.device(device).type == "cuda" else torch.float32


def load_layer(reader: CheckpointReader, config: ModelConfig, prefix: str, layer: int) -> DecoderLayer:
    """Load one decoder layer whose tensors start with `prefix`; `layer` is its index in the pool."""
    return DecoderLayer(
        input_norm=RMSNorm(reader.take(f"{prefix}input_layernorm.weight", (config.hidden_size,)), config.rms_norm_eps),
        attention=load_attention(reader, config, f"{prefix}self_attn.", layer),
        post_attention_norm=RMSNorm(reader.take(f"{prefix}post_attention_layernorm.weight", (config.hidden_size,)), config.rms_norm_eps),
        mlp=load_mlp(reader, config, f"{prefix}mlp."),
    )


def load_attention(reader: CheckpointReader, config: ModelConfig, prefix: str, layer: int, input_size: int | None = None) -> Attention:
    """Load ``q_proj, k_proj, v_proj, o_proj`` behind `prefix`; `input_size` is the projections' input width (hidden_size unless given)."""
    width = input_size or config.hidden_size
    q_rows, kv_rows = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    rows = {"q_proj": q_rows, "k_proj": kv_rows, "v_proj": kv_rows}
    qkv = Linear(
        reader.take_rows([(f"{prefix}{name}.weight", (count, width)) for name, count in rows.items()]),
        reader.take_rows([(f"{prefix}{name}.bias", (count,)) for name, count in rows.items()]) if config.qkv_bias else None,
    )
    o = Linear(
        reader.take(f"{prefix}o_proj.weight", (config.hidden_size, q_rows)),
        reader.take(f"{prefix}o_proj.bias", (config.hidden_size,)) if config.o_bias else None,
    )
    return Attention(qkv, o, config.num_heads, config.num_kv_heads, config.head_dim, layer)


def load_mlp(reader: CheckpointReader, config: ModelConfig, prefix: str) -> GatedMLP:
    """Load ``gate_proj, up_proj, down_proj`` behind `prefix`."""
    hidden, intermediate = config.hidden_size, config.intermediate_size
    names = (f"{prefix}gate_proj", f"{prefix}up_proj")
    gate_up = Linear(
        reader.take_rows([(f"{name}.weight", (intermediate, hidden)) for name in names]),
        reader.take_rows([(f"{name}.bias", (intermediate,)) for name in names]) if config.mlp_bias else None,
    )
    down = Linear(
        reader.take(f"{prefix}down_proj.weight", (hidden, intermediate)),
        reader.take(f"{prefix}down_proj.bias", (hidden,)) if config.mlp_bias else None,
    )
    return GatedMLP(gate_up, down, config.activation)


def expected_layer_tensors(config: ModelConfig, prefix: str, attention_input: int | None = None) -> dict[str, Shape]:
    """Return name → shape of one decoder layer's tensors, as `load_layer` takes them."""
    hidden, intermediate = config.hidden_size, config.intermediate_size
    q_rows, kv_rows = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    width = attention_input or hidden
    linears = {
        "self_attn.q_proj": (q_rows, width, config.qkv_bias),
        "self_attn.k_proj": (kv_rows, width, config.qkv_bias),
        "self_attn.v_proj": (kv_rows, width, config.qkv_bias),
        "self_attn.o_proj": (hidden, q_rows, config.o_bias),
        "mlp.gate_proj": (intermediate, hidden, config.mlp_bias),
        "mlp.up_proj": (intermediate, hidden, config.mlp_bias),
        "mlp.down_proj": (hidden, intermediate, config.mlp_bias),
    }
    shapes: dict[str, Shape] = {f"{prefix}{name}.weight": (hidden,) for name in ("input_layernorm", "post_attention_layernorm")}
    for name, (rows, columns, has_bias) in linears.items():
        shapes[f"{prefix}{name}.weight"] = (rows, columns)
        if has_bias:
            shapes[f"{prefix}{name}.bias"] = (rows,)
    return shapes


def expected_tensors(config: ModelConfig) -> dict[str, Shape]:
    """Return name → shape of every tensor that a checkpoint of this configuration must hold."""
    shapes: dict[str, Shape] = {EMBEDDING: (config.vocab_size, config.hidden_size), FINAL_NORM: (config.hidden_size,)}
    if not config.tie_word_embeddings:
        shapes[LM_HEAD] = (config.vocab_size, config.hidden_size)
    for index in range(config.num_layers):
        shapes |= expected_layer_tensors(config, f"model.layers.{index}.")
    return shapes


def _ignored(config: ModelConfig, reader: CheckpointReader) -> list[str]:
    """Return the tensors of old or redundant exports that carry nothing: rotary buffers, and a tied head stored a second time."""
    buffers = [name for name in reader.names if name.endswith("rotary_emb.inv_freq")]
    return [*buffers, LM_HEAD] if config.tie_word_embeddings else buffers
