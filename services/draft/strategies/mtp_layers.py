"""Multi-token prediction layers as models are published with them: which tensors, and how token and state are joined.

    x = projection([hidden_norm(state) ; token_norm(embed(token))])      (or the embedding first)
    state' = final_norm(decoder_layer(x));   logits = the target's lm_head(state')

Sources: the DeepSeek-V3 report (arXiv 2412.19437, section 2.2) and the published code of DeepSeek-V3 and MiMo as SGLang runs it. Following
SGLang, the state that the first layer takes is the target's last hidden state *after* its final norm, and the state that goes on to the
next layer, or to the next step of the same layer, is normed by the layer's own final norm.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from outrider.shared.attn.base import AttentionBackend
from outrider.shared.base.errors import CheckpointError
from outrider.shared.kv.pool import KVPool
from outrider.shared.nn.checkpoint.checkpoint_reader import CheckpointReader
from outrider.shared.nn.checkpoint.fp8_source import SCALE_SUFFIX, Fp8Source
from outrider.shared.nn.checkpoint.tensor_source import TensorSource
from outrider.shared.nn.config.model_config import CONFIG_FILE, ConfigReader, ModelConfig, read_json
from outrider.shared.nn.layers.blocks import DecoderLayer, Linear, RMSNorm
from outrider.shared.nn.layers.load import load_layer
from outrider.shared.nn.layers.rope import Rotation
from outrider.shared.nn.open import read_model_config

COUNT = "num_nextn_predict_layers"


@dataclass(frozen=True, slots=True)
class MtpDialect:
    """How a family names and joins its MTP layers.

    Attributes:
        layers: Prefix of the layers; the layer's number follows.
        hidden_norm, token_norm, projection, final_norm: Names within a layer.
        hidden_first: The state is the first half of what is projected, not the second.
        blind_start: The embedding counts as zero in the row of position 0.
        ignored: Names within a layer that are stored a second time.
    """

    layers: str
    hidden_norm: str
    token_norm: str
    projection: str
    final_norm: str
    hidden_first: bool
    blind_start: bool
    ignored: tuple[str, ...] = ()


MIMO = MtpDialect(
    "model.mtp_layers.",
    "hidden_layernorm",
    "token_layernorm",
    "input_proj",
    "final_layernorm",
    hidden_first=True,
    blind_start=True,
)
DEEPSEEK = MtpDialect(
    "model.layers.",
    "hnorm",
    "enorm",
    "eh_proj",
    "shared_head.norm",
    hidden_first=False,
    blind_start=False,
    ignored=("embed_tokens.weight", "shared_head.head.weight"),  # copies of the target's, which are borrowed
)
DIALECTS = (MIMO, DEEPSEEK)


class MtpLayer:
    """One layer: joins a token with a state, then a decoder layer.

    Args:
        dialect: How.
        hidden_norm, token_norm: Of the two halves.
        projection: ``[hidden, 2 * hidden]``.
        block: The decoder layer.
        final_norm: Over its output.
    """

    def __init__(
        self,
        dialect: MtpDialect,
        hidden_norm: RMSNorm,
        token_norm: RMSNorm,
        projection: Linear,
        block: DecoderLayer,
        final_norm: RMSNorm,
    ) -> None:
        self._dialect = dialect
        self._hidden_norm = hidden_norm
        self._token_norm = token_norm
        self._projection = projection
        self._block = block
        self._final_norm = final_norm

    def __call__(
        self,
        embedded: torch.Tensor,
        states: torch.Tensor,
        rotation: Rotation,
        attention: AttentionBackend,
        pool: KVPool,
    ) -> torch.Tensor:
        """Return the states after this layer, ``[rows, hidden]``.

        Args:
            embedded: ``[rows, hidden]``, embeddings of the rows' tokens.
            states: ``[rows, hidden]``, of the target or of the layer before.
            rotation: Of the rows' positions.
            attention: Planned for these rows.
            pool: The K/V of all MTP layers.
        """
        halves = [self._hidden_norm(states), self._token_norm(embedded)]
        joined = torch.cat(halves if self._dialect.hidden_first else halves[::-1], dim=-1)
        return self._final_norm(self._block(self._projection(joined), rotation, attention, pool))


@dataclass(frozen=True, slots=True)
class MtpWeights:
    """The MTP layers of a checkpoint.

    Attributes:
        config: Of the target that they belong to.
        dialect: How they join token and state.
        layers: In the order of their depth.
        prefixes: What the names of their tensors start with, in the same order.
        fingerprint: Of configuration and weights.
    """

    config: ModelConfig
    dialect: MtpDialect
    layers: Sequence[MtpLayer]
    prefixes: tuple[str, ...]
    fingerprint: str

    @classmethod
    def load(cls, path: Path, device: torch.device, dtype: torch.dtype) -> MtpWeights:
        """Read the MTP layers of a model's folder, and nothing else of it.

        Raises:
            CheckpointError: there are none, one is incomplete or has tensors that nothing uses; names the key or tensor.
        """
        config = read_model_config(path)
        with CheckpointReader(path, device=device, dtype=dtype) as reader:
            dialect, numbers = _find_layers(path, reader)
            with torch.inference_mode():
                source: TensorSource = reader
                if config.weight_block:
                    source = Fp8Source(reader, reader.tensors, config.weight_block, dtype)
                layers = [
                    _load(source, config, dialect, f"{dialect.layers}{number}.", index)
                    for index, number in enumerate(numbers)
                ]
            prefixes = tuple(f"{dialect.layers}{number}." for number in numbers)
            others = [name for name in reader.names if not name.startswith(prefixes)]
            copies = [f"{prefix}{name}" for prefix in prefixes for name in dialect.ignored]
            if config.weight_block:  # a copy in FP8 comes with its scales
                copies += [name + SCALE_SUFFIX for name in copies]
            reader.finish(ignored=[*others, *copies, "*rotary_emb.inv_freq"])
            fingerprint = f"{config.fingerprint[:32]}{reader.fingerprint[:32]}"
        return cls(config, dialect, layers, prefixes, fingerprint)


def _find_layers(path: Path, reader: CheckpointReader) -> tuple[MtpDialect, list[int]]:
    """Return the dialect of a folder's MTP layers and their numbers, ascending."""
    for dialect in DIALECTS:
        pattern = re.compile(
            re.escape(dialect.layers) + r"(\d+)\." + re.escape(dialect.projection) + r"\.weight"
        )
        numbers = sorted(int(match.group(1)) for match in map(pattern.fullmatch, reader.names) if match)
        if not numbers:
            continue
        config = ConfigReader(read_json(path / CONFIG_FILE), path / CONFIG_FILE)
        if numbers != list(range(numbers[0], numbers[0] + len(numbers))):
            raise CheckpointError(
                f"{path}: MTP layers {numbers} have a gap; download the checkpoint again.",
                field=dialect.projection,
            )
        if config.positive(COUNT, len(numbers)) != len(numbers):
            raise config.error(
                COUNT,
                f"is {config.raw[COUNT]}, but the checkpoint holds {len(numbers)} MTP layers; download it again",
            )
        return dialect, numbers
    raise CheckpointError(
        f"{path} holds no MTP layers (model.mtp_layers.*, or eh_proj behind the last layer).", field=COUNT
    )


def _load(
    source: TensorSource, config: ModelConfig, dialect: MtpDialect, prefix: str, index: int
) -> MtpLayer:
    hidden = config.hidden_size

    def norm(name: str) -> RMSNorm:
        return RMSNorm(source.take(f"{prefix}{name}.weight", (hidden,)), config.rms_norm_eps)

    return MtpLayer(
        dialect,
        norm(dialect.hidden_norm),
        norm(dialect.token_norm),
        Linear(source.take(f"{prefix}{dialect.projection}.weight", (hidden, 2 * hidden))),
        load_layer(source, config, prefix, index, like=config.num_layers - 1),
        norm(dialect.final_norm),
    )
