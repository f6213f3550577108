"""Applies torch.compile to the norms and MLPs of models that run through transformers' modules."""

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
    """Compile the norms and MLPs of a model that runs through `transformers`, with torch.compile.

    Attention is not compiled, because it calls this project's kernels. Each module is compiled for any number
    of rows when it first runs. If layers have equal modules, these modules share the compiled code.

    Args:
        decoder: The decoder of the model. It is changed in place.
        max_rows: Largest number of rows (tokens) for which compiled code is used. Larger passes run
            uncompiled.

    Raises:
        ConfigurationError: The model has its own decoder with fused kernels, or the device is a CPU and there
            is no C++ compiler.
    """
    if not isinstance(decoder.config, GenericConfig):
        raise _refused(
            f"{decoder.config.architecture} has a decoder of its own, with its own kernels; "
            "leave the flag out."
        )
    if decoder.device.type == "cpu" and not any(shutil.which(name) for name in COMPILERS):
        raise _refused(
            "torch needs a C++ compiler to compile for a CPU, and none of "
            f"{', '.join(COMPILERS)} is installed; install one."
        )
    model: nn.Module = decoder.model  # type: ignore[attr-defined]
    layout = decoder.config.layout
    for layer_path, attention_path in zip(layout.layer_paths, layout.attention_paths, strict=True):
        # Compile every child of a layer except the child that contains the attention.
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
