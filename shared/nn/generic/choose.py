"""Decides whether a model is served through `transformers`. Imports `transformers` only if needed."""

from __future__ import annotations

from importlib.util import find_spec

from outrider.shared.nn.checkpoint.json_config import ConfigReader
from outrider.shared.nn.families.registry import may_use_transformers
from outrider.shared.nn.generic.layout import GenericConfig


def read_generic(reader: ConfigReader, eos_token_ids: tuple[int, ...]) -> GenericConfig | None:
    """Return the configuration of a model that runs through `transformers`, or None for other models.

    Returns:
        The configuration. None if one of this project's model families reads the model, or if `transformers`
        does not implement the model.

    Raises:
        CheckpointError: The model cannot be served through `transformers`, or `transformers` is not
            installed.
    """
    if not may_use_transformers(reader):
        return None
    if find_spec("transformers") is None:
        raise reader.error(
            "model_type",
            f"{reader.raw['model_type']!r} needs transformers: pip install 'outrider[engine]'",
        )
    from outrider.shared.nn.generic import config

    if not config.known(reader.raw["model_type"]):
        return None
    return config.parse_generic_config(reader, eos_token_ids)
