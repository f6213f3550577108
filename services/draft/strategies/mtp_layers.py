"""Loads multi-token prediction (MTP) layers from a model's checkpoint, and runs one layer.

    x = projection([hidden_norm(state) ; token_norm(embed(token))])      (or the embedding first)
    state' = final_norm(decoder_layer(x));   logits = the target's lm_head(state')

Sources: the DeepSeek-V3 report (arXiv 2412.19437, section 2.2), and SGLang's version of the published code of
DeepSeek-V3 and MiMo. As in SGLang, the first layer reads the target's last hidden state *after* the target's
final norm. Each layer applies its own final norm to its output state. This state is the input of the next
layer, or of the layer's own next step.
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
from outrider.shared.nn.layers.load import load_layer
from outrider.shared.nn.layers.modules import DecoderLayer, Linear, RMSNorm
from outrider.shared.nn.layers.rope import Rotation
from outrider.shared.nn.open import read_model_config

COUNT = "num_nextn_predict_layers"
EXPORTED = "NextN"
"""Suffix of the architecture's name in a folder that contains only an MTP layer, as SGLang exports it."""


@dataclass(frozen=True, slots=True)
class MtpDialect:
    """How a model family names the tensors of its MTP layers, and how these layers combine token and state.

    Attributes:
        layers: Prefix of the names of a layer's tensors. The layer's number follows the prefix.
        hidden_norm, token_norm, projection, final_norm: Names of these modules within a layer.
        hidden_first: True if the state is the first half of the projection's input, False if it is the second
            half.
        blind_start: True if the row of position 0 uses zeros instead of the token's embedding.
        ignored: Names, within a layer, of tensors that only repeat other tensors of the checkpoint.
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
    ignored=("embed_tokens.weight", "shared_head.head.weight"),  # copies of tensors borrowed from the target
)
DIALECTS = (MIMO, DEEPSEEK)


class MtpLayer:
    """One MTP layer: combines token and state, then applies a decoder layer and a norm.

    Args:
        dialect: How token and state are combined.
        hidden_norm, token_norm: Norms of the state and of the token's embedding.
        projection: ``[hidden, 2 * hidden]``, applied to the concatenated state and embedding, in the
            dialect's order.
        block: The decoder layer.
        final_norm: The norm of the decoder layer's output.
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
            states: ``[rows, hidden]``, states of the target or of the previous layer.
            rotation: Rotary angles of the rows' positions.
            attention: Backend planned for these rows.
            pool: KV pool of all MTP layers.
        """
        halves = [self._hidden_norm(states), self._token_norm(embedded)]
        joined = torch.cat(halves if self._dialect.hidden_first else halves[::-1], dim=-1)
        return self._final_norm(self._block(self._projection(joined), rotation, attention, pool))


@dataclass(frozen=True, slots=True)
class MtpWeights:
    """The MTP layers of a checkpoint.

    Attributes:
        config: Configuration of the target that the layers belong to.
        dialect: How the layers combine token and state.
        layers: The layers, in order.
        prefixes: For each layer, the prefix of the names of its tensors.
        fingerprint: Fingerprint of the layers' configuration and weights.
    """

    config: ModelConfig
    dialect: MtpDialect
    layers: Sequence[MtpLayer]
    prefixes: tuple[str, ...]
    fingerprint: str

    @classmethod
    def load(cls, path: Path, device: torch.device, dtype: torch.dtype) -> MtpWeights:
        """Read only the MTP layers from a model's folder.

        Raises:
            CheckpointError: There are no MTP layers, or a layer is incomplete or has unused tensors. The
                message names the key or tensor.
        """
        config = read_mtp_config(path)
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


def read_mtp_config(path: Path) -> ModelConfig:
    """Return the configuration of the model that the MTP layers in a folder belong to.

    SGLang's exporter (``export_deepseek_nextn.py``) stores one MTP layer as layer 0 of a model that has only
    this layer. In the DeepSeek family, the first layers of a model are dense, but the MTP layer is sparse.
    The returned configuration therefore has the original model's leading dense layers, followed by one sparse
    layer.

    Raises:
        CheckpointError: The configuration cannot be read. The message names the key.
    """
    source = path / CONFIG_FILE
    raw = read_json(source)
    names = raw.get("architectures")
    if not isinstance(names, list) or not names or not str(names[0]).endswith(EXPORTED):
        return read_model_config(path)
    reader = ConfigReader(raw, source)
    layers = reader.count("first_k_dense_replace", 0) + 1
    original = {"architectures": [str(names[0]).removesuffix(EXPORTED)], "num_hidden_layers": layers}
    return ModelConfig.parse(raw | original, source=source)


def _find_layers(path: Path, reader: CheckpointReader) -> tuple[MtpDialect, list[int]]:
    """Return the dialect of a checkpoint's MTP layers, and their numbers in ascending order."""
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
                f"{path}: the numbers of the MTP layers, {numbers}, have a gap. Download the checkpoint "
                "again.",
                field=dialect.projection,
            )
        if config.positive(COUNT, len(numbers)) != len(numbers):
            raise config.error(
                COUNT,
                f"is {config.raw[COUNT]}, but the checkpoint contains {len(numbers)} MTP layers. Download "
                "it again",
            )
        return dialect, numbers
    raise CheckpointError(
        f"{path} contains no MTP layers (model.mtp_layers.*, or eh_proj after the last layer). Give the "
        "folder of a model that was published with them.",
        field=COUNT,
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
