"""Decides whether a config.json takes the generic path; imports `transformers` only when it may."""

from __future__ import annotations

from importlib.util import find_spec

from outrider.shared.nn.checkpoint.json_config import ConfigReader
from outrider.shared.nn.families.registry import left_to_others
from outrider.shared.nn.generic.layout import GenericConfig


def read_generic(reader: ConfigReader, eos_token_ids: tuple[int, ...]) -> GenericConfig | None:
    """Return the configuration of a model that `transformers` computes; None when a family here reads it, or nothing does.

    Raises:
        CheckpointError: `transformers` knows the model and it cannot be served, or `transformers` is not installed.
    """
    if not left_to_others(reader):
        return None
    if find_spec("transformers") is None:
        raise reader.error(
            "model_type",
            f"{reader.raw['model_type']!r} needs transformers: pip install 'transformers>=5.17,<5.24'",
        )
    from outrider.shared.nn.generic import config

    if not config.known(reader.raw["model_type"]):
        return None
    return config.parse_generic_config(reader, eos_token_ids)
