"""Checks before loading that a model's weights fit into free GPU memory. Reads only file headers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path

import torch

from outrider.services.target.choices import Quantization
from outrider.services.target.settings import TargetSettings
from outrider.services.target.startup.memory_plan import gpu_memory
from outrider.shared.base.errors import ConfigurationError
from outrider.shared.nn.checkpoint.checkpoint_reader import CheckpointReader
from outrider.shared.nn.checkpoint.tensor_file import TensorInfo
from outrider.shared.nn.checkpoint.weight_sizes import gib, loaded_bytes
from outrider.shared.nn.decoder import LM_HEAD, default_dtype
from outrider.shared.nn.generic.layout import GenericConfig
from outrider.shared.nn.open import expected_tensors, read_model_config
from outrider.shared.parallel.shard import Shard

ROUNDED = (
    "q_proj.weight",
    "k_proj.weight",
    "v_proj.weight",
    "o_proj.weight",
    "gate_proj.weight",
    "up_proj.weight",
    "down_proj.weight",
)
MORE_RANKS = (2, 4, 8, 16)


def check_weights_fit(settings: TargetSettings) -> None:
    """Check that a rank's weights fit into the free memory of its GPU. Do nothing on a CPU.

    Args:
        settings: The target's settings. `model`, `device`, `dtype`, `tp` and `quantization` are used.

    Raises:
        ConfigurationError: The weights do not fit. The message contains the needed memory, the free memory
            and possible fixes.
        CheckpointError: The model folder cannot be read.
    """
    device = settings.torch_device()
    memory = gpu_memory(device)
    if memory is None:
        return
    free, total = memory
    dtype = settings.torch_dtype() or default_dtype(device)
    sizes = WeightSizes(settings.model, dtype)
    rounded = settings.quantization is Quantization.FP8
    needed = sizes.while_loading(settings.tp, rounded=rounded)
    if needed <= free:
        return
    shared = f" on each of {settings.tp} GPUs" if settings.tp > 1 else ""
    fitting = [
        *_what_fits(sizes, settings, free, rounded=rounded),
        "use another device, or stop other processes on this one",
    ]
    raise ConfigurationError(
        f"{settings.model} does not fit: its weights need {gib(needed)}{shared} as "
        f"{_as(dtype, rounded=rounded)}, and {device} has {gib(free)} free of {gib(total)}. "
        f"Possible fixes: {'; '.join(fitting)}.",
        field="device",
    )


class WeightSizes:
    """Sizes in bytes of the weights in a model folder.

    Args:
        folder: The model folder.
        dtype: Data type that the weights have after loading.

    Raises:
        CheckpointError: The folder cannot be read.
    """

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        self.config = read_model_config(folder)
        self.dtype = dtype
        with CheckpointReader(folder) as reader:
            names, stored = expected_tensors(self.config), reader.tensors
            # `transformers` also accepts other tensor names (no prefix, separate experts). If a folder uses
            # such names, count every stored tensor.
            renamed = isinstance(self.config, GenericConfig) and not (names and names.keys() <= stored.keys())
            self.tensors: Mapping[str, TensorInfo] = {
                name: info for name, info in stored.items() if renamed or name in names
            }

    @property
    def can_round(self) -> bool:
        """True if the model's products can be computed in FP8."""
        plain = (
            not isinstance(self.config, GenericConfig)
            and self.config.experts is None
            and self.config.latent is None
        )
        return plain and self.dtype is torch.bfloat16

    def can_split(self, ranks: int) -> bool:
        """Return True if the model can be split among this many ranks."""
        try:
            Shard.of(self.config, 0, ranks)
        except ConfigurationError:
            return False
        return True

    def of_rank(self, ranks: int = 1, *, rounded: bool = False, dtype: torch.dtype | None = None) -> int:
        """Return the bytes of each rank's weights.

        Args:
            ranks: Number of ranks among which the weights are split.
            rounded: True if matrix products use FP8 where supported. Each layer's matrices then take one byte
                per number, and the output head has an additional FP8 copy.
            dtype: Data type of the weights, if it differs from the constructor's `dtype`.
        """
        dtype = dtype or self.dtype
        shard = Shard.of(self.config, 0, ranks) if ranks > 1 else None
        total = 0
        for name, info in self.tensors.items():
            narrow = rounded and self.can_round and name.endswith(ROUNDED)
            size = prod(info.shape) + 4 * info.shape[0] if narrow else loaded_bytes(name, info, dtype)
            total += size // ranks if name == LM_HEAD else _part_of(shard, name, size)
        return total + (
            self.config.vocab_size * self.config.hidden_size // ranks if rounded and self.can_round else 0
        )

    def while_loading(
        self, ranks: int = 1, *, rounded: bool = False, dtype: torch.dtype | None = None
    ) -> int:
        """Return the peak bytes per rank while the weights are loaded.

        With FP8, the peak also includes one layer in its unrounded form.

        Args:
            ranks, rounded, dtype: As in `of_rank`.
        """
        held = self.of_rank(ranks, rounded=rounded, dtype=dtype)
        if not (rounded and self.can_round):
            return held
        shard = Shard.of(self.config, 0, ranks) if ranks > 1 else None
        layers: Counter[str] = Counter()
        for name, info in self.tensors.items():
            if name.endswith(ROUNDED):
                layers[name.rsplit(".", 3)[0]] += _part_of(
                    shard, name, loaded_bytes(name, info, dtype or self.dtype)
                )
        return held + max(layers.values(), default=0)


def _part_of(shard: Shard | None, name: str, size: int) -> int:
    """Return the part of a tensor's bytes that one rank stores."""
    part = shard.part(name) if shard is not None else None
    return size if part is None else size * part[1].local // part[1].whole


def _what_fits(sizes: WeightSizes, settings: TargetSettings, free: int, *, rounded: bool) -> Iterator[str]:
    """Yield flags with which the weights would fit.

    If neither `--tp` nor FP8 is enough alone, yield a combination of the two.
    """
    one = dict(_fitting_ranks(sizes, settings.tp, free, rounded=rounded))
    yield from (f"use --tp {ranks} ({gib(size)} on each GPU)" for ranks, size in one.items())
    narrow = sizes.while_loading(settings.tp, rounded=True) if sizes.can_round and not rounded else free + 1
    if narrow <= free:
        yield f"use --quantization fp8 ({gib(narrow)})"
    elif not one and sizes.can_round and not rounded:
        both = _fitting_ranks(sizes, settings.tp, free, rounded=True)
        yield from (
            f"use --tp {ranks} with --quantization fp8 ({gib(size)} on each GPU)" for ranks, size in both
        )
    if (
        sizes.dtype is torch.float32
        and (half := sizes.while_loading(settings.tp, dtype=torch.bfloat16)) <= free
    ):
        yield f"use --dtype bfloat16 ({gib(half)})"


def _fitting_ranks(sizes: WeightSizes, ranks: int, free: int, *, rounded: bool) -> Iterator[tuple[int, int]]:
    """Yield the next larger number of ranks on which the weights fit, and the bytes per rank.

    Yield nothing if the weights fit on no larger number of ranks.
    """
    for more in MORE_RANKS:
        if (
            more > ranks
            and sizes.can_split(more)
            and (size := sizes.while_loading(more, rounded=rounded)) <= free
        ):
            yield more, size
            return


def _as(dtype: torch.dtype, *, rounded: bool) -> str:
    return "FP8" if rounded else str(dtype).removeprefix("torch.")
