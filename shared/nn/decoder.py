"""The decoder of all target families over paged K/V."""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import filter as match_names
from pathlib import Path
from typing import TypeVar

import torch
from torch.nn import functional

from outrider.kernels.verify import SamplingTensors, choose_tokens
from outrider.shared.attn.base import AttentionBackend
from outrider.shared.attn.stored import StoredAttention
from outrider.shared.base.errors import CheckpointError, ConfigurationError
from outrider.shared.kv.pool import KVPool, token_bytes
from outrider.shared.nn.config import ModelConfig
from outrider.shared.nn.fp8 import Fp8Source, expect_scales
from outrider.shared.nn.fp8_linear import Fp8Linear, quantize_layer
from outrider.shared.nn.fused import FusedForward, can_fuse
from outrider.shared.nn.generic.layout import GenericConfig
from outrider.shared.nn.kv_scales import ScaledSource, find_scales, read_scales
from outrider.shared.nn.layers import DecoderLayer, Linear, RMSNorm
from outrider.shared.nn.load import load_attention, load_layer, load_mlp
from outrider.shared.nn.loader import CheckpointReader, ExpectedTensors, Shape, TensorSource
from outrider.shared.nn.rope import RotaryEmbedding
from outrider.shared.nn.weight_sizes import gib, loaded_bytes
from outrider.shared.obs.logging import get_logger

EMBEDDING = "model.embed_tokens.weight"
LM_HEAD = "lm_head.weight"
FINAL_NORM = "model.norm.weight"

__all__ = [
    "Decoder",
    "DecoderOutput",
    "default_dtype",
    "expected_headers",
    "expected_tensors",
    "load_attention",
    "load_layer",
    "load_mlp",
]

_log = get_logger("outrider.decoder")

Pool = TypeVar("Pool", bound=KVPool)
Progress = Callable[[int, int], None]
"""Called with (bytes loaded, bytes in all)."""
OnLayer = Callable[[DecoderLayer], None]
"""Changes a layer as soon as it is loaded, before the next one is: what it lets go is free again."""


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
        lm_head: ``[vocab, hidden]``; the same tensor as `embedding` when tied. As it was loaded, whatever `logits` computes with.
        layers, norm, rotary: The parts.
        fingerprint: Identifies configuration and weights.
        fused: What runs in place of the layers' own operations, or None.
        kv_dtype: Of K and V in pools that are made for it; None: `dtype`.
    """

    kv_dtype: torch.dtype | None = None
    fused: FusedForward | None = None

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
        self.rotary = RotaryEmbedding(config.rope, config.rotary_dim, self.device, self.dtype)
        self.fingerprint = fingerprint
        self._fuse()

    def _fuse(self) -> None:
        if can_fuse(self.layers, self.device, self.dtype):
            self.fused = FusedForward(self.layers, self.embedding, self.norm, self._head)

    @torch.inference_mode()
    def quantize_fp8(self) -> None:
        """Keep the layers' projections in FP8 from now on, with a scale per output channel, and compute logits by such a copy of the head.

        The embedding stays as it is, and so does the wide output head: drafts borrow it, and the embedding may be the same tensor. To be
        called before the first pass: recorded graphs would still read the old weights.

        Raises:
            ConfigurationError: Layers of another kind than dense ones with plain attention; fp32 weights on a CPU; a share of a model.
        """
        try:
            for layer in self.layers:
                quantize_layer(layer)
            head = Fp8Linear.of(self._head)
        except TypeError as error:
            raise ConfigurationError(
                f"quantization fp8: {error}. Serve this model without it.", field="quantization"
            ) from error
        self.use_rounded(head)
        self._fuse()

    def use_rounded(self, head: Linear) -> None:
        """Compute logits by this head from now on, as part of rounding the decoder's products to FP8; `lm_head` stays as it is."""
        self._head = head
        self.fingerprint = hashlib.sha256(f"{self.fingerprint} fp8".encode()).hexdigest()

    @classmethod
    def load(
        cls,
        path: Path | str,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | None = None,
        progress: Progress | None = None,
        on_layer: OnLayer | None = None,
    ) -> Decoder:
        """Load a Hugging Face model folder.

        Args:
            path: Holds ``config.json`` and ``*.safetensors`` (or ``pytorch_model*.bin``).
            device: Where the weights go, file by file, without a second copy in host memory.
            dtype: Of weights and activations; None is fp32 on the CPU and bf16 on CUDA.
            progress: Told how many bytes are loaded.
            on_layer: Changes every layer (not of models that `transformers` computes).

        Raises:
            CheckpointError: Something is missing, unexpected, misshaped, corrupt or unsupported; nothing was allocated then.
            ConfigurationError: The device has not enough memory.
        """
        config = ModelConfig.from_dir(path)
        dtype = dtype or default_dtype(device)
        try:
            if isinstance(config, GenericConfig):
                return _open_generic(path, config, torch.device(device), dtype, progress)
            return cls._load(path, config, torch.device(device), dtype, progress, on_layer)
        except torch.OutOfMemoryError as error:
            needed = f"{_needed(path, config, dtype)} as {str(dtype).removeprefix('torch.')}"
            if on_layer is None:
                why, smaller = f": its weights need {needed}", " or a smaller dtype"
            else:  # what they are changed to is not known here
                why, smaller = (
                    f", though its layers are rounded as they are loaded (before, its weights are {needed})",
                    "",
                )
            raise ConfigurationError(
                f"{path} does not fit into the free memory of {device}{why}; choose another device{smaller}, or end what else uses it.",
                field="device",
            ) from error

    @classmethod
    def _load(
        cls,
        path: Path | str,
        config: ModelConfig,
        device: torch.device,
        dtype: torch.dtype,
        progress: Progress | None,
        on_layer: OnLayer | None,
    ) -> Decoder:
        with checked_source(path, config, device, dtype, progress) as checkpoint, torch.inference_mode():
            parts = _load_parts(checkpoint.source, config, on_layer)
        return cls(config, parts.embedding, parts.layers, parts.norm, parts.lm_head, checkpoint.fingerprint)

    @property
    def weight_bytes(self) -> int:
        """Bytes of embedding, output head, its rounded copy and projections (norms are negligible)."""
        layers = sum(layer.attention.nbytes + layer.mlp.nbytes for layer in self.layers)
        rounded = self._head.nbytes if self._head.rounded else 0
        return self.embedding.nbytes + self.lm_head.nbytes + rounded + layers

    @property
    def computed_by(self) -> str:
        """What computes the layers, in a few words for the log."""
        return "torch's operations" if self.fused is None else "fused kernels"

    @property
    def cached(self) -> ModelConfig:
        """What K and V this process keeps, as a configuration."""
        return self.config

    def make_pool(self, num_pages: int, page_size: int, feature_size: int = 0) -> KVPool:
        """Make a pool of this decoder's shape on its device."""
        return self._pool_of(KVPool, num_pages, page_size, feature_size)

    def _pool_of(self, kind: type[Pool], num_pages: int, page_size: int, feature_size: int) -> Pool:
        kept = self.cached
        return kind(
            num_pages, page_size, kept.num_layers, kept.num_kv_heads, kept.head_dim, self.dtype, self.device, feature_size,
            latent=kept.latent is not None, kv_dtype=self.kv_dtype,
        )  # fmt: skip

    def token_bytes(self, feature_size: int = 0) -> int:
        """Return the bytes that a token takes in this process's part of the pool, with a feature row of that width."""
        kept = self.cached
        return token_bytes(
            kept.num_layers, kept.num_kv_heads, kept.head_dim, self.dtype, feature_size,
            latent=kept.latent is not None, kv_dtype=self.kv_dtype,
        )  # fmt: skip

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
        rotation = self.rotary(positions)
        if self.fused is not None and isinstance(attention, StoredAttention):
            return DecoderOutput(*self.fused.forward(tokens, rotation, attention, pool, aux_layer_ids))
        hidden = self.embed(tokens)
        aux: list[torch.Tensor] = []
        for index, layer in enumerate(self.layers):
            hidden = layer(hidden, rotation, attention, pool)
            if index in aux_layer_ids:
                aux.append(hidden)
        assert len(aux) == len(aux_layer_ids), (
            f"aux layers {aux_layer_ids} of a decoder with {len(self.layers)}"
        )
        return DecoderOutput(hidden=self.norm(hidden), aux=torch.cat(aux, dim=-1) if aux else None)

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return ``[rows, vocab]`` for hidden rows ``[rows, hidden_size]`` after the final norm, in the weights' type.

        Whatever reads them widens each number as it takes it: a copy in fp32 would be the largest tensor of a round.
        """
        if self.fused is not None:
            return self.fused.logits(hidden)
        return self._head(hidden)

    def choose(
        self, hidden: torch.Tensor, sampling: SamplingTensors, positions: torch.Tensor
    ) -> torch.Tensor:
        """Return `choose_tokens` of the rows' logits: ``[rows] int64``."""
        return choose_tokens(self.logits(hidden), sampling, positions)


@dataclass(frozen=True, slots=True)
class CheckedSource:
    """An open checkpoint whose headers are what the configuration needs.

    Attributes:
        source: Of its tensors, widened where they are stored in FP8, with the scales of its cache in them.
        fingerprint: Of configuration and weights.
    """

    source: TensorSource
    fingerprint: str


@contextmanager
def checked_source(
    path: Path | str,
    config: ModelConfig,
    device: torch.device,
    dtype: torch.dtype,
    progress: Progress | None = None,
) -> Iterator[CheckedSource]:
    """Open a checkpoint of one of our own families and check its headers; the arguments are those of `Decoder.load`.

    Raises:
        CheckpointError: As `Decoder.load`.
    """
    with CheckpointReader(path, device=device, dtype=dtype, progress=progress) as reader:
        expected = expected_headers(config)
        source: TensorSource = reader
        if config.weight_block:
            expect_scales(expected, reader.tensors, config.weight_block)
            source = Fp8Source(reader, reader.tensors, config.weight_block, dtype)
        scaled = find_scales(reader.tensors, config)
        expected.shapes |= scaled
        reader.check(expected.shapes, ignored=config.ignored, dtypes=expected.dtypes)
        if scaled and dtype is not torch.float16:  # whose range the scaled weights might leave
            _log.info(
                "scales of an FP8 cache are moved into the weights", checkpoint=str(path), count=len(scaled)
            )
            source = ScaledSource(source, read_scales(reader, scaled), head_norm=config.head_norm)
        _log_ignored(path, config, [name for name in reader.names if name not in expected.shapes])
        reader.read_ahead(expected.shapes)
        yield CheckedSource(
            source, hashlib.sha256(f"{config.fingerprint} {reader.fingerprint}".encode()).hexdigest()
        )


def _open_generic(
    path: Path | str,
    config: GenericConfig,
    device: torch.device,
    dtype: torch.dtype,
    progress: Progress | None,
) -> Decoder:
    """Load a model that `transformers` computes; only such a model imports it."""
    model = importlib.import_module("outrider.shared.nn.generic.model")
    decoder: Decoder = model.GenericDecoder.open(path, config, device, dtype, progress)
    return decoder


def _needed(path: Path | str, config: ModelConfig, dtype: torch.dtype) -> str:
    """Return what the weights of a folder that could not be loaded take."""
    names = expected_tensors(config)
    with CheckpointReader(path) as reader:
        stored = reader.tensors.items()
        return gib(
            sum(
                loaded_bytes(name, info, dtype)
                for name, info in stored
                if name in names or isinstance(config, GenericConfig)
            )
        )


def default_dtype(device: torch.device | str) -> torch.dtype:
    """Return what ``dtype auto`` means: bf16 on CUDA, fp32 elsewhere."""
    return torch.bfloat16 if torch.device(device).type == "cuda" else torch.float32


def expected_tensors(config: ModelConfig) -> dict[str, Shape]:
    """Return name → shape of every tensor that a checkpoint of this configuration must hold."""
    if isinstance(config, GenericConfig):
        return dict(config.layout.shapes)
    return expected_headers(config).shapes


@dataclass(frozen=True, slots=True)
class _Parts:
    """What a checkpoint is loaded into."""

    embedding: torch.Tensor
    layers: list[DecoderLayer]
    norm: RMSNorm
    lm_head: torch.Tensor


def _load_parts(source: TensorSource, config: ModelConfig, on_layer: OnLayer | None = None) -> _Parts:
    table = (config.vocab_size, config.hidden_size)
    embedding = source.take(EMBEDDING, table)
    layers = []
    for index in range(config.num_layers):
        layers.append(load_layer(source, config, f"model.layers.{index}.", index))
        if on_layer is not None:
            on_layer(layers[-1])
    norm = RMSNorm(source.take(FINAL_NORM, (config.hidden_size,)), config.rms_norm_eps)
    return _Parts(
        embedding, layers, norm, embedding if config.tie_word_embeddings else source.take(LM_HEAD, table)
    )


def expected_headers(config: ModelConfig) -> ExpectedTensors:
    """Return shapes and types of every tensor that a checkpoint of one of our own families must hold, scales of FP8 matrices aside."""
    expected = ExpectedTensors()
    _load_parts(expected, config)
    return expected


def _log_ignored(path: Path | str, config: ModelConfig, left: Collection[str]) -> None:
    """Say which tensors of a checked file stay in it, and why."""
    for pattern, reason in config.ignored.items():
        names = match_names(left, pattern)
        if names:
            _log.info(
                "tensors ignored",
                checkpoint=str(path),
                pattern=pattern,
                count=len(names),
                first=min(names),
                reason=reason,
            )
