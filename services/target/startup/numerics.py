"""Applies the settings that change the model's computation: determinism, FP8, torch.compile, attention."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import torch

from outrider.kernels.skinny_gemm.kept import Tried
from outrider.services.target.choices import KvCacheDtype, Quantization
from outrider.services.target.settings import TargetSettings
from outrider.services.target.startup.weight_fit import check_weights_fit
from outrider.shared.attn.base import AttentionBackend
from outrider.shared.attn.create import AttentionKind, create_backend
from outrider.shared.attn.deterministic import DeterministicAttention
from outrider.shared.attn.library import Library, prepare_within
from outrider.shared.attn.triton import KernelAttention
from outrider.shared.base.errors import ConfigurationError
from outrider.shared.nn.config.model_config import ModelConfig
from outrider.shared.nn.decoder import Decoder, OnLayer, OnProgress, default_dtype
from outrider.shared.nn.deterministic import deterministic
from outrider.shared.nn.fused import FusedForward
from outrider.shared.nn.fused.trial import BUDGET_S, try_products
from outrider.shared.nn.open import load_decoder, read_model_config
from outrider.shared.nn.quantized import fp8_rounding, quantize_decoder
from outrider.shared.obs.logging import get_logger
from outrider.shared.parallel.decoder import ShardedDecoder
from outrider.shared.parallel.tiles import spread_tiles

_log = get_logger("outrider.target")


def prepare_decoder(settings: TargetSettings, decoder: Decoder) -> Decoder:
    """Change a loaded target model as the settings require, and return it.

    Raises:
        ConfigurationError: The model does not support a setting. The error names the setting.
    """
    if settings.enable_torch_compile:
        _compile(decoder, settings.torch_compile_max_bs)
    if settings.quantization is Quantization.FP8:
        quantize = (
            decoder.quantize if isinstance(decoder, ShardedDecoder) else partial(quantize_decoder, decoder)
        )
        quantize()
    if settings.kv_cache_dtype is KvCacheDtype.FP8_E4M3:
        _narrow_cache(decoder)
    if settings.deterministic:
        decoder = deterministic(decoder)
    _log.info("layers", computed_by=decoder.computed_by, dtype=str(decoder.dtype).removeprefix("torch."))
    if (
        decoder.fused is not None
        and not settings.deterministic
        and decoder.device.type == "cuda"
        and not settings.disable_tile_trial
    ):
        _choose_tiles(settings, decoder, decoder.fused)
    return decoder


def load_target_model(settings: TargetSettings, progress: OnProgress | None = None) -> Decoder:
    """Load the target model in one process. Call `prepare_decoder` on the result before serving.

    With FP8, each layer is rounded as it is loaded.

    Raises:
        CheckpointError: The checkpoint is missing or invalid; see `load_decoder`.
        ConfigurationError: The model does not fit into the free memory, or does not support FP8.
    """
    check_weights_fit(settings)
    device, dtype = settings.torch_device(), settings.torch_dtype()
    rounding = None
    if settings.quantization is not Quantization.NONE:
        rounding = layer_rounding(
            settings, read_model_config(settings.model), device, dtype or default_dtype(device)
        )
    return load_decoder(settings.model, device, dtype, progress, rounding)


def layer_rounding(
    settings: TargetSettings, config: ModelConfig, device: torch.device, dtype: torch.dtype
) -> OnLayer | None:
    """Return a function that rounds the weights of a loaded layer to FP8. Without FP8, return None.

    Raises:
        ConfigurationError: The model or the device does not support FP8; see `fp8_rounding`.
    """
    return fp8_rounding(config, device, dtype) if settings.quantization is Quantization.FP8 else None


def prepare_attention(settings: TargetSettings, decoder: Decoder) -> AttentionBackend:
    """Return the attention backend for the settings.

    Raises:
        ConfigurationError: The backend cannot run on this device.
    """
    if settings.deterministic:
        return DeterministicAttention()
    if settings.kv_cache_dtype is not KvCacheDtype.AUTO:
        # Only the Triton backend converts K and V to a wider type. On a CPU, this backend runs a reference
        # implementation.
        return create_backend(AttentionKind.TRITON, decoder.device)
    return create_backend(settings.attention_backend, decoder.device)


def prepare_rank(settings: TargetSettings, decoder: Decoder) -> AttentionBackend:
    """Prepare the loaded model of a rank above 0, and the calling thread, which runs the passes of this rank.

    Returns:
        The attention backend of the rank.

    Raises:
        ConfigurationError: The model or the attention does not support a setting; see `prepare_decoder` and
            `prepare_attention`.
    """
    prepare_decoder(settings, decoder)
    attention = prepare_attention(settings, decoder)
    library = prompt_library(settings, decoder, attention)
    if library is not None and isinstance(attention, KernelAttention):
        prepare_within(library, attention.use_library)
    return attention


def prompt_library(settings: TargetSettings, decoder: Decoder, attention: AttentionBackend) -> Library | None:
    """Return the attention library that may compute the attention of long prompts.

    Return None if the library supports none of the model's layers. The caller must prepare the library on the
    thread that runs the passes.
    """
    kept = decoder.cached
    if not isinstance(attention, KernelAttention) or decoder.device.type != "cuda":
        return None
    if decoder.kv_dtype is not None or kept.latent is not None or kept.sinks or all(kept.windows):
        return None
    return Library(
        kept.num_heads,
        kept.num_kv_heads,
        kept.head_dim,
        decoder.dtype,
        decoder.device,
        settings.prefill_tokens(),
    )


def idle_preparation(
    settings: TargetSettings, decoder: Decoder, attention: AttentionBackend
) -> Iterable[object]:
    """Return work that makes long prompts faster, as an iterator of pieces. Run it on the engine's thread."""
    library = prompt_library(settings, decoder, attention)
    if library is None or not isinstance(attention, KernelAttention):
        return ()
    return library.prepare(attention.use_library)


def _compile(decoder: Decoder, max_rows: int) -> None:
    # Import this module here, because the module imports `transformers`, which no other option needs.
    from outrider.shared.nn.generic.compiled import compile_generic

    compile_generic(decoder, max_rows)


def _choose_tiles(settings: TargetSettings, decoder: Decoder, fused: FusedForward) -> None:
    """Time the kernel tiles of products that were never timed. Rank 0 chooses the tiles for all ranks."""
    ranks = decoder.collectives if isinstance(decoder, ShardedDecoder) else None
    # The other ranks wait for the result, so limit the time to well below their timeout.
    budget_s = BUDGET_S if ranks is None else min(BUDGET_S, settings.tp_timeout_s / 4)
    tried: list[Tried] = []
    if ranks is None or ranks.rank == 0:
        tried = try_products(fused.uses(), decoder.device, budget_s)
    if ranks is not None:
        spread_tiles(ranks, tried, decoder.device)


def _narrow_cache(decoder: Decoder) -> None:
    if decoder.device.type == "cuda" and torch.cuda.get_device_capability(decoder.device) < (8, 9):
        raise ConfigurationError(
            "kv_cache_dtype: the GPU does not support FP8, which needs compute capability 8.9 or higher. "
            "Omit --kv-cache-dtype.",
            field="kv_cache_dtype",
        )
    decoder.kv_dtype = torch.float8_e4m3fn
