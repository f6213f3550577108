"""torch.compile for models that run through transformers' modules."""

from __future__ import annotations

import shutil
from typing import Any

import torch
from torch import nn

from outrider.shared.base.errors import ConfigurationError
from outrider.shared.nn.decoder import Decoder
from outrider.shared.nn.generic.layout import GenericConfig

COMPILERS = ("g++", "clang++", "c++")


def compile_generic(decoder: Decoder, max_rows: int) -> None:
    """Compile what the layers do beside attention: their norms and MLPs. Attention is a call into our own kernels and stays as it is.

    Each is compiled when it first runs, for any number of rows; equal modules of different layers share the code.

    Args:
        decoder: A model that runs through transformers' modules; changed in place.
        max_rows: Passes with more rows run uncompiled.

    Raises:
        ConfigurationError: The decoder is one of our own, which run fused kernels instead, or there is no C++ compiler for a CPU.
    """
    if not isinstance(decoder.config, GenericConfig):
        raise _refused(
            f"{decoder.config.architecture} has a decoder of its own, which runs kernels of its own; leave the flag out."
        )
    if decoder.device.type == "cpu" and not any(shutil.which(name) for name in COMPILERS):
        raise _refused(
            f"torch compiles for a CPU by a C++ compiler, and none of {', '.join(COMPILERS)} is installed; install one."
        )
    model: nn.Module = decoder.model  # type: ignore[attr-defined]
    layout = decoder.config.layout
    for layer_path, attention_path in zip(layout.layer_paths, layout.attention_paths, strict=True):
        for name, child in model.get_submodule(layer_path).named_children():
            if attention_path != f"{layer_path}.{name}" and not attention_path.startswith(
                f"{layer_path}.{name}."
            ):
                _compile(child, max_rows)


def _compile(module: nn.Module, max_rows: int) -> None:
    plain = module.forward
    compiled = torch.compile(plain, dynamic=True)

    def forward(x: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        run = compiled if x.dim() < 2 or x.shape[-2] <= max_rows else plain
        return run(x, *arguments, **options)

    module.forward = forward


def _refused(why: str) -> ConfigurationError:
    return ConfigurationError(f"enable_torch_compile: {why}", field="enable_torch_compile")
