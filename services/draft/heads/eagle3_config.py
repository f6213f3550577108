"""The configuration of an EAGLE-3 head, in each dialect that checkpoints come in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.services.draft.strategy import TargetInfo
from outrider.shared.base.errors import CheckpointError
from outrider.shared.nn.config import CONFIG_FILE, ConfigReader, ModelConfig, read_json

DEFAULT_NUM_AUX = 3
MIN_LAYERS_FOR_DEFAULT_AUX = 7


@dataclass(frozen=True, slots=True)
class Eagle3Config:
    """An EAGLE-3 head.

    Attributes:
        layer: Sizes of its one decoder layer; ``layer.vocab_size`` is the target's vocabulary.
        draft_vocab_size: Rows of its lm_head, or None when the file does not say.
        target_hidden_size: Width of one aux feature, and of a borrowed embedding.
        num_aux: How many layers' outputs feed it.
        aux_layer_ids: Which (outputs of layer i, ascending), or None for the default triple.
        norm_before_residual: The residual of the layer is the normed feature, not the feature.
        norm_output: The next step's feature is the normed state.
    """

    layer: ModelConfig
    draft_vocab_size: int | None
    target_hidden_size: int
    num_aux: int
    aux_layer_ids: tuple[int, ...] | None
    norm_before_residual: bool
    norm_output: bool

    @classmethod
    def from_dir(cls, path: Path) -> Eagle3Config:
        """Read ``config.json``.

        Raises:
            CheckpointError: something is missing or not supported; `field` names the key.
        """
        return cls.parse(read_json(path / CONFIG_FILE), path / CONFIG_FILE)

    @classmethod
    def parse(cls, raw: Mapping[str, Any], source: Path | str = CONFIG_FILE) -> Eagle3Config:
        """Parse a configuration that is already read; `source` is named in errors."""
        flat = _flatten(raw, source)
        reader = ConfigReader(flat, source)
        layer = ModelConfig.parse(flat, source=source)
        if layer.num_layers != 1:
            raise reader.error("num_hidden_layers", f"EAGLE-3 heads of {layer.num_layers} layers are not supported; only of 1")
        if layer.mlp_bias or layer.o_bias:
            key = "mlp_bias" if layer.mlp_bias else "attention_bias"
            raise reader.error(key, "biases are not supported in an EAGLE-3 head")
        aux = _aux_layer_ids(reader)
        num_aux = reader.positive("num_aux_hidden_states", len(aux) if aux else DEFAULT_NUM_AUX)
        if aux is not None and len(aux) != num_aux:
            raise reader.error("num_aux_hidden_states", f"is {num_aux}, but eagle_aux_hidden_state_layer_ids names {len(aux)} layers")
        draft_vocab_size = reader.positive("draft_vocab_size", 0) or None
        if draft_vocab_size is not None and draft_vocab_size > layer.vocab_size:
            raise reader.error("draft_vocab_size", f"{draft_vocab_size} is above vocab_size {layer.vocab_size}")
        return cls(
            layer=layer,
            draft_vocab_size=draft_vocab_size,
            target_hidden_size=reader.positive("target_hidden_size", layer.hidden_size),
            num_aux=num_aux,
            aux_layer_ids=aux,
            norm_before_residual=reader.flag("norm_before_residual", False),
            norm_output=reader.flag("norm_output", False),
        )

    def check_target(self, target: TargetInfo) -> tuple[int, ...]:
        """Return the aux layers to capture of a target.

        Raises:
            CheckpointError: the head was made for another target; names the key and both values.
        """
        if target.vocab_size != self.layer.vocab_size:
            raise CheckpointError(
                f"The head's vocab_size is {self.layer.vocab_size}, the target's {target.vocab_size}: serve the target that this head was "
                "trained for, or another --draft.",
                field="vocab_size",
            )
        if target.hidden_size != self.target_hidden_size:
            key = "target_hidden_size" if self.target_hidden_size != self.layer.hidden_size else "hidden_size"
            raise CheckpointError(
                f"The head reads features of hidden size {self.target_hidden_size} ({key}), the target's is {target.hidden_size}: serve "
                "the target that this head was trained for, or another --draft.",
                field=key,
            )
        if self.aux_layer_ids is not None:
            if self.aux_layer_ids[-1] >= target.num_layers:
                raise CheckpointError(
                    f"The head reads layers {list(self.aux_layer_ids)}, the target has {target.num_layers}: serve the target that this "
                    "head was trained for, or correct eagle_aux_hidden_state_layer_ids.",
                    field="eagle_aux_hidden_state_layer_ids",
                )
            return self.aux_layer_ids
        if self.num_aux != DEFAULT_NUM_AUX:
            raise CheckpointError(
                f"The head reads {self.num_aux} layers without naming them: add eagle_aux_hidden_state_layer_ids to its config.json.",
                field="eagle_aux_hidden_state_layer_ids",
            )
        if target.num_layers < MIN_LAYERS_FOR_DEFAULT_AUX:
            raise CheckpointError(
                f"The default aux layers need a target of at least {MIN_LAYERS_FOR_DEFAULT_AUX} layers, this one has {target.num_layers}: "
                "name them by eagle_aux_hidden_state_layer_ids in the head's config.json.",
                field="eagle_aux_hidden_state_layer_ids",
            )
        # Outputs of these layers are the inputs of 2, L // 2 and L - 3, which is how the official code counts.
        return (1, target.num_layers // 2 - 1, target.num_layers - 4)


def _flatten(raw: Mapping[str, Any], source: Path | str) -> dict[str, Any]:
    """Merge the dialects into one flat object: nested layer config < top level < eagle_config."""
    flat: dict[str, Any] = {}
    for key in ("transformer_layer_config", "eagle_config"):
        section = raw.get(key)
        if section is not None and not isinstance(section, Mapping):
            raise CheckpointError(f"{source}: {key}: must be an object, not {section!r}.", field=key)
    flat |= raw.get("transformer_layer_config") or {}
    flat |= {key: value for key, value in raw.items() if key not in ("transformer_layer_config", "eagle_config") and value is not None}
    flat |= {key: value for key, value in (raw.get("eagle_config") or {}).items() if value is not None}
    return flat


def _aux_layer_ids(reader: ConfigReader) -> tuple[int, ...] | None:
    key = "eagle_aux_hidden_state_layer_ids"
    value = reader.raw.get(key)
    if value is None:
        return None
    valid = isinstance(value, list) and value and all(isinstance(layer, int) and not isinstance(layer, bool) for layer in value)
    if not valid or value != sorted(set(value)) or value[0] < 0:
        raise reader.error(key, f"must list layers in ascending order, not {value!r}")
    return tuple(value)
