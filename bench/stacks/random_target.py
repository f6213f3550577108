"""Makes a target with random weights, for a named model shape, directly on the target's device.

For most shapes, the target consists of Outrider's own layers. For generic models, it consists of modules of
the package `transformers`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from outrider.bench.stacks.random_fit import target_bytes
from outrider.bench.stacks.shapes import NamedShape
from outrider.shared.nn.checkpoint.json_config import ConfigReader
from outrider.shared.nn.decoder import Decoder
from outrider.shared.nn.dummy import random_decoder
from outrider.shared.nn.generic.layout import GenericConfig
from outrider.shared.obs.progress import Progress, Waiting

if TYPE_CHECKING:
    from outrider.shared.nn.generic.model import GenericDecoder

MAKING = "making random weights"


def random_target(shape: NamedShape, device: torch.device, dtype: torch.dtype) -> Decoder:
    """Return a target of the given shape, like a model that `load_decoder` loads from a checkpoint.

    The function shows its progress.

    Raises:
        CheckpointError: The shape needs `transformers`, which is not installed or rejects the shape.
    """
    config = shape.model_config()
    if isinstance(config, GenericConfig):
        with Waiting(MAKING):
            return _generic(shape, config, device, dtype)
    with Progress(MAKING, target_bytes(shape, dtype), counts=False) as progress:
        return random_decoder(config, device, dtype, progress.advance)


def _generic(
    shape: NamedShape, config: GenericConfig, device: torch.device, dtype: torch.dtype
) -> GenericDecoder:
    # Import these modules only here, because they import `transformers`, which no other shape needs.
    from outrider.shared.nn.generic.attention import PAGED
    from outrider.shared.nn.generic.config import find_class
    from outrider.shared.nn.generic.model import GenericDecoder

    model_class, settings = find_class(ConfigReader(shape.target, f"--shape {shape.name}"))
    with torch.device(device), torch.inference_mode(False):
        model = model_class._from_config(settings, dtype=dtype, attn_implementation=PAGED)
    return GenericDecoder(config, model.eval().requires_grad_(False), f"random {config.fingerprint}")
