"""What a family's file provides."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from outrider.shared.nn.checkpoint.json_config import ConfigReader
from outrider.shared.nn.families.traits import Traits


def nothing(reader: ConfigReader, num_layers: int) -> Mapping[str, str]:
    """Ignore no tensors."""
    return {}


@dataclass(frozen=True, slots=True)
class Family:
    """One family of published models.

    Attributes:
        model_type, architectures: The names that its config.json carries.
        traits: Reads the family's keys of a config.json; the second argument is the number of layers.
        ignored: Patterns of tensor names that the decoder does not use → the reason; arguments as `traits`.
        bundled_code: Modules that published repositories of the family name in ``auto_map``. The decoder here replaces them; nothing
            of them is ever run. Any other ``auto_map`` is refused.
        quantisations: The ``quant_method`` values that its tensors can be read with.
    """

    model_type: str
    architectures: tuple[str, ...]
    traits: Callable[[ConfigReader, int], Traits]
    ignored: Callable[[ConfigReader, int], Mapping[str, str]] = nothing
    bundled_code: tuple[str, ...] = ()
    quantisations: tuple[str, ...] = ()


def windows(reader: ConfigReader, num_layers: int) -> tuple[int, ...]:
    """Return the window of each layer from ``sliding_window`` and ``layer_types`` (absent: every layer has the window).

    Raises:
        CheckpointError: ``layer_types`` has the wrong length, or names attention that keeps no K/V per token.
    """
    window = reader.positive("sliding_window", 0) if reader.raw.get("sliding_window") is not None else 0
    kinds = reader.strings("layer_types")
    if kinds is None:
        return (window,) * num_layers
    if len(kinds) != num_layers:
        raise reader.error("layer_types", f"names {len(kinds)} layers, num_hidden_layers is {num_layers}")
    unknown = sorted(set(kinds) - {"sliding_attention", "full_attention"})
    if unknown:
        raise reader.error(
            "layer_types", f"{unknown[0]!r} is not supported; a layer is sliding_attention or full_attention"
        )
    if "sliding_attention" in kinds and not window:
        raise reader.error("sliding_window", "is missing, and layer_types names sliding_attention")
    return tuple(window if kind == "sliding_attention" else 0 for kind in kinds)
