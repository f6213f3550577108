"""Defines `Family`, the interface of a family's file, and reads each layer's sliding window."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from outrider.shared.nn.checkpoint.json_config import ConfigReader
from outrider.shared.nn.families.traits import Traits


def no_ignored_tensors(reader: ConfigReader, num_layers: int) -> Mapping[str, str]:
    """Return no patterns. This is `Family.ignored` for a family whose tensors are all used."""
    return {}


@dataclass(frozen=True, slots=True)
class Family:
    """A family of published models, and its rules for reading a config.json.

    Attributes:
        model_type, architectures: Names by which a config.json identifies the family.
        traits: Function that reads the family's own keys of a config.json. The second argument of this
            function is the number of layers.
        ignored: Function that returns a map from patterns of unused tensor names to the reason why these
            tensors are not used. The arguments are the same as those of `traits`.
        bundled_code: Names of Python modules that published repositories of the family contain and list in
            ``auto_map``. This project's decoder replaces these modules. They are never run. A config.json
            that lists any other module in ``auto_map`` is rejected.
        quantisations: Values of config.json's ``quant_method`` for which the family's tensors can be read.
    """

    model_type: str
    architectures: tuple[str, ...]
    traits: Callable[[ConfigReader, int], Traits]
    ignored: Callable[[ConfigReader, int], Mapping[str, str]] = no_ignored_tensors
    bundled_code: tuple[str, ...] = ()
    quantisations: tuple[str, ...] = ()


def windows(reader: ConfigReader, num_layers: int) -> tuple[int, ...]:
    """Read each layer's attention window from ``sliding_window`` and ``layer_types`` of a config.json.

    If there is no ``layer_types``, every layer has the window ``sliding_window``.

    Raises:
        CheckpointError: ``layer_types`` has the wrong length, or contains a kind of attention that stores no
            K/V per token.
    """
    window = reader.positive("sliding_window", 0) if reader.raw.get("sliding_window") is not None else 0
    kinds = reader.strings("layer_types")
    if kinds is None:
        return (window,) * num_layers
    if len(kinds) != num_layers:
        raise reader.error("layer_types", f"lists {len(kinds)} layers, but num_hidden_layers is {num_layers}")
    unknown = sorted(set(kinds) - {"sliding_attention", "full_attention"})
    if unknown:
        raise reader.error(
            "layer_types", f"{unknown[0]!r} is not supported; supported: sliding_attention, full_attention"
        )
    if "sliding_attention" in kinds and not window:
        raise reader.error("sliding_window", "is missing, but layer_types contains sliding_attention")
    return tuple(window if kind == "sliding_attention" else 0 for kind in kinds)
