"""The configuration of an EAGLE-3 head, in each dialect that checkpoints come in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.services.draft.heads.head_config import SERVE_ANOTHER, HeadConfig, flatten
from outrider.services.draft.strategy import TargetInfo
from outrider.shared.base.errors import CheckpointError
from outrider.shared.nn.config import CONFIG_FILE, ConfigReader, read_json

DEFAULT_NUM_AUX = 3
MIN_LAYERS_FOR_DEFAULT_AUX = 7
AUX_KEY = "eagle_aux_hidden_state_layer_ids"


@dataclass(frozen=True, slots=True)
class Eagle3Config:
    """An EAGLE-3 head.

    Attributes:
        layer: Its decoder layers; ``layer.vocab_size`` is the target's vocabulary.
        draft_vocab_size: Rows of its lm_head, or None when the file does not say.
        borrows_lm_head: ``draft_vocab_size`` is null: the target's lm_head is used, whatever the file holds.
        target_hidden_size: Width of one aux feature, and of a borrowed embedding.
        final_hidden: The feature is the target's last hidden state instead of aux layers (``use_aux_hidden_state: false``).
        num_aux: How many layers' outputs feed it.
        aux_layer_ids: Which (outputs of layer i, ascending), or None for the default triple.
        fc_norm, input_norm, fc_bias: Whether the projector has these parts; None = as the file holds them.
        attention_bias: The projections of q, k and v must have biases; otherwise as the file holds them.
        norm_before_residual: The residual of the first layer is the normed feature, not the feature.
        norm_output: The next step's feature is the normed state.
    """

    layer: HeadConfig
    draft_vocab_size: int | None
    borrows_lm_head: bool
    target_hidden_size: int
    final_hidden: bool
    num_aux: int
    aux_layer_ids: tuple[int, ...] | None
    fc_norm: bool | None
    input_norm: bool | None
    fc_bias: bool | None
    attention_bias: bool
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
        flat = flatten(raw, source)
        reader = ConfigReader(flat, source)
        layer = HeadConfig.parse(reader)
        aux = _aux_layer_ids(reader)
        num_aux = reader.positive("num_aux_hidden_states", len(aux) if aux else DEFAULT_NUM_AUX)
        if aux is not None and len(aux) != num_aux:
            raise reader.error("num_aux_hidden_states", f"is {num_aux}, but {AUX_KEY} names {len(aux)} layers")
        draft_vocab_size = reader.positive("draft_vocab_size", 0) or None
        if draft_vocab_size is not None and draft_vocab_size > layer.vocab_size:
            raise reader.error("draft_vocab_size", f"{draft_vocab_size} is above vocab_size {layer.vocab_size}")
        target_hidden_size = reader.positive("target_hidden_size", layer.hidden_size)
        final_hidden = not reader.flag("use_aux_hidden_state", True)
        if final_hidden and target_hidden_size != layer.hidden_size:
            raise reader.error("use_aux_hidden_state", "false needs a head as wide as the target: its last hidden state is not projected")
        return cls(
            layer=layer,
            draft_vocab_size=draft_vocab_size,
            borrows_lm_head="draft_vocab_size" in raw and draft_vocab_size is None and target_hidden_size == layer.hidden_size,
            target_hidden_size=target_hidden_size,
            final_hidden=final_hidden,
            num_aux=num_aux,
            aux_layer_ids=aux,
            fc_norm=_optional_flag(reader, "fc_norm", "use_aux_norm"),
            input_norm=_optional_flag(reader, "norm_before_fc"),
            fc_bias=_optional_flag(reader, "bias"),
            attention_bias=reader.flag("attention_bias", False),
            norm_before_residual=reader.flag("norm_before_residual", False),
            norm_output=reader.flag("norm_output", False),
        )

    @property
    def aux_convention(self) -> str:
        """How the aux layers are counted, for the log: mixing the conventions up costs accept length silently."""
        if self.final_hidden:
            return "none: the last hidden state"
        if self.aux_layer_ids is None:
            return "default triple: outputs of 1, L//2 - 1, L - 4"
        if self._counts_inputs(0):
            return f"inputs of {list(self.aux_layer_ids)}"
        return f"outputs of {list(self.aux_layer_ids)}; inputs of them if the last is the target's number of layers"

    def check_target(self, target: TargetInfo) -> tuple[int, ...]:
        """Return the aux layers to capture of a target (their outputs); empty when the last hidden state is wanted.

        Raises:
            CheckpointError: the head was made for another target; names the key and both values.
        """
        self.layer.check_vocabulary(target)
        if target.hidden_size != self.target_hidden_size:
            key = "target_hidden_size" if self.target_hidden_size != self.layer.hidden_size else "hidden_size"
            raise CheckpointError(
                f"The head reads features of hidden size {self.target_hidden_size} ({key}), the target's is {target.hidden_size}: "
                f"{SERVE_ANOTHER}.",
                field=key,
            )
        if self.final_hidden:
            return ()
        if self.aux_layer_ids is not None:
            return _outputs(self.aux_layer_ids, target.num_layers, self._counts_inputs(target.num_layers))
        if self.num_aux != DEFAULT_NUM_AUX:
            raise CheckpointError(
                f"The head reads {self.num_aux} layers without naming them: add {AUX_KEY} to its config.json.", field=AUX_KEY
            )
        if target.num_layers < MIN_LAYERS_FOR_DEFAULT_AUX:
            raise CheckpointError(
                f"The default aux layers need a target of at least {MIN_LAYERS_FOR_DEFAULT_AUX} layers, this one has {target.num_layers}: "
                f"name them by {AUX_KEY} in the head's config.json.",
                field=AUX_KEY,
            )
        # Outputs of these layers are the inputs of 2, L // 2 and L - 3, which is how the official code counts.
        return (1, target.num_layers // 2 - 1, target.num_layers - 4)

    def _counts_inputs(self, num_layers: int) -> bool:
        """Whether the ids name inputs of layers instead of outputs.

        They do where the last is the number of layers, an output that does not exist (heads for gpt-oss), and in heads with latent
        attention (Kimi-K2) unless they begin with 1, as SGLang reads them.
        """
        ids = self.aux_layer_ids or (0,)
        return (ids[0] > 0 and ids[-1] == num_layers) or (self.layer.latent is not None and ids[0] != 1)


def _outputs(layer_ids: tuple[int, ...], num_layers: int, counts_inputs: bool) -> tuple[int, ...]:
    outputs = tuple(layer - 1 for layer in layer_ids) if counts_inputs else layer_ids
    if outputs[0] < 0 or outputs[-1] >= num_layers:
        raise CheckpointError(
            f"The head reads layers {list(layer_ids)}, the target has {num_layers}: {SERVE_ANOTHER}; or correct {AUX_KEY}.", field=AUX_KEY
        )
    return outputs


def _aux_layer_ids(reader: ConfigReader) -> tuple[int, ...] | None:
    value = reader.raw.get(AUX_KEY)
    if value is None:
        return None
    valid = isinstance(value, list) and value and all(isinstance(layer, int) and not isinstance(layer, bool) for layer in value)
    if not valid or value != sorted(set(value)) or value[0] < 0:
        raise reader.error(AUX_KEY, f"must list layers in ascending order, not {value!r}")
    return tuple(value)


def _optional_flag(reader: ConfigReader, *names: str) -> bool | None:
    """Return whether one of the flags is set; None when none of them is there."""
    given = [reader.flag(name, False) for name in names if reader.raw.get(name) is not None]
    return any(given) if given else None
