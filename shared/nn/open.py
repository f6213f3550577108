"""Opens a model folder: reads the configuration, checks the tensor files' headers, and loads the decoder."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import filter as match_names
from pathlib import Path

import torch

from outrider.shared.base.errors import ConfigurationError
from outrider.shared.nn.checkpoint.checkpoint_reader import CheckpointReader
from outrider.shared.nn.checkpoint.fp8_source import Fp8Source, expect_scales
from outrider.shared.nn.checkpoint.json_config import ConfigReader, faults_of, read_json
from outrider.shared.nn.checkpoint.tensor_source import ExpectedTensors, TensorShape, TensorSource
from outrider.shared.nn.checkpoint.weight_sizes import gib, loaded_bytes
from outrider.shared.nn.config.model_config import (
    CONFIG_FILE,
    GENERATION_CONFIG_FILE,
    ModelConfig,
    eos_token_ids,
)
from outrider.shared.nn.decoder import (
    EMBEDDING,
    FINAL_NORM,
    LM_HEAD,
    Decoder,
    OnLayer,
    OnProgress,
    default_dtype,
)
from outrider.shared.nn.families.registry import check_architecture
from outrider.shared.nn.generic.choose import read_generic
from outrider.shared.nn.generic.layout import GenericConfig
from outrider.shared.nn.kv_scales import ScaledSource, find_scales, read_scales
from outrider.shared.nn.layers.load import load_layer
from outrider.shared.nn.layers.modules import DecoderLayer, RMSNorm
from outrider.shared.obs.logging import get_logger

_log = get_logger("outrider.decoder")


def read_model_config(path: Path | str) -> ModelConfig:
    """Read ``config.json`` (and ``generation_config.json``) of a Hugging Face model folder.

    Raises:
        CheckpointError: The folder or a file is missing, a file is not JSON, or the model cannot be served.
            The error's `field` is the file or key at fault.
    """
    folder = Path(path)
    raw = read_json(folder / CONFIG_FILE)
    generation = (
        read_json(folder / GENERATION_CONFIG_FILE) if (folder / GENERATION_CONFIG_FILE).is_file() else {}
    )
    with faults_of(folder / CONFIG_FILE):
        reader = ConfigReader(raw, folder / CONFIG_FILE)
        check_architecture(reader)
        generic = read_generic(reader, eos_token_ids(reader, generation))
        return generic or ModelConfig.parse(raw, source=folder / CONFIG_FILE, generation=generation)


def load_decoder(
    path: Path | str,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    progress: OnProgress | None = None,
    on_layer: OnLayer | None = None,
) -> Decoder:
    """Load the decoder in a Hugging Face model folder.

    Args:
        path: Folder with ``config.json`` and ``*.safetensors`` (or ``pytorch_model*.bin``).
        device: Device for the weights. The files are loaded one by one, without a second copy of the weights
            in host memory.
        dtype: Type of weights and activations. With None, the type is fp32 on a CPU and bf16 on CUDA.
        progress: Called with the number of bytes loaded so far and the total number.
        on_layer: Function that may change each layer right after it is loaded. Not called for models that run
            through `transformers`. With None, layers are not changed.

    Raises:
        CheckpointError: A file or tensor is missing, unexpected, misshaped, corrupt or unsupported. Headers
            are checked before memory is allocated.
        ConfigurationError: The device does not have enough memory.
    """
    config = read_model_config(path)
    dtype = dtype or default_dtype(device)
    try:
        if isinstance(config, GenericConfig):
            return _open_generic(path, config, torch.device(device), dtype, progress)
        return _load(path, config, torch.device(device), dtype, progress, on_layer)
    except torch.OutOfMemoryError as error:
        needed = f"{_needed(path, config, dtype)} as {str(dtype).removeprefix('torch.')}"
        if on_layer is None:
            why, smaller = f": its weights need {needed}", " or a smaller dtype"
        else:  # `on_layer` reduces the size of the layers by an unknown amount.
            why, smaller = (
                f", even with layers that are quantized as they are loaded "
                f"(without that, they need {needed})",
                "",
            )
        raise ConfigurationError(
            f"{path} does not fit into the free memory of {device}{why}; choose another device{smaller}, "
            "or stop other processes that use it.",
            field="device",
        ) from error


def _load(
    path: Path | str,
    config: ModelConfig,
    device: torch.device,
    dtype: torch.dtype,
    progress: OnProgress | None,
    on_layer: OnLayer | None,
) -> Decoder:
    with checked_source(path, config, device, dtype, progress) as checkpoint, torch.inference_mode():
        parts = _load_parts(checkpoint.source, config, on_layer)
    return Decoder(config, parts.embedding, parts.layers, parts.norm, parts.lm_head, checkpoint.fingerprint)


@dataclass(frozen=True, slots=True)
class CheckedSource:
    """An open checkpoint whose headers match the configuration.

    Attributes:
        source: Source of the tensors. This source converts FP8 matrices to a wider type, and applies the
            scales of an FP8 KV cache.
        fingerprint: Identifies configuration and weights.
    """

    source: TensorSource
    fingerprint: str


@contextmanager
def checked_source(
    path: Path | str,
    config: ModelConfig,
    device: torch.device,
    dtype: torch.dtype,
    progress: OnProgress | None = None,
) -> Iterator[CheckedSource]:
    """Open the checkpoint of a supported model family, and check the headers of its files.

    Args:
        path: The model folder.
        config: Configuration of the model.
        device: Device for the weights.
        dtype: Type of the weights.
        progress: Called with the number of bytes loaded so far and the total number.

    Raises:
        CheckpointError: A file or tensor is missing, unexpected, misshaped, corrupt or unsupported.
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
        if scaled and dtype is not torch.float16:  # Scaled weights might exceed fp16's range.
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
    progress: OnProgress | None,
) -> Decoder:
    """Load a model that runs through `transformers`, which is imported only here."""
    from outrider.shared.nn.generic.model import GenericDecoder

    return GenericDecoder.open(path, config, device, dtype, progress)


def _needed(path: Path | str, config: ModelConfig, dtype: torch.dtype) -> str:
    """Return text for an error message that states the memory needed for a folder's loaded weights."""
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


def expected_tensors(config: ModelConfig) -> dict[str, TensorShape]:
    """Return the name and shape of every tensor that a checkpoint of this configuration must contain."""
    if isinstance(config, GenericConfig):
        return dict(config.layout.shapes)
    return expected_headers(config).shapes


@dataclass(frozen=True, slots=True)
class _Parts:
    """The loaded parts of a decoder."""

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
    """Return the tensors that a checkpoint of one of the families must contain, apart from FP8 scales."""
    expected = ExpectedTensors()
    _load_parts(expected, config)
    return expected


def _log_ignored(path: Path | str, config: ModelConfig, left: Collection[str]) -> None:
    """Log which tensors of a checked file are not loaded, and the reason for each."""
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
