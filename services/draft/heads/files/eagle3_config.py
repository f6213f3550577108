"""The configuration of an EAGLE-3 head, in each dialect that checkpoints come in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.services.draft.heads.files.aux_layers import AUX_KEY, AuxConvention, AuxLayers
from outrider.services.draft.heads.files.head_config import SERVE_ANOTHER, HeadConfig, flatten
from outrider.services.draft.heads.files.mistral_format import config_file, read_head_config
from outrider.services.draft.heads.files.modelopt_config import check_eagle3
from outrider.services.draft.target_info import TargetInfo
from outrider.shared.base.errors import CheckpointError
from outrider.shared.nn.config.model_config import CONFIG_FILE, ConfigReader

__all__ = ["AUX_KEY", "Eagle3Config"]


@dataclass(frozen=True, slots=True)
class Eagle3Config:
    """An EAGLE-3 head.

    Attributes:
        layer: Its decoder layers; ``layer.vocab_size`` is the target's vocabulary.
        draft_vocab_size: Rows of its lm_head, or None when the file does not say.
        hot_vocab_size: FR-Spec: how many frequent tokens it drafts, named by ``hot_token_id`` or a token map; None for all.
        borrows_lm_head: ``draft_vocab_size`` is null: the target's lm_head is used, whatever the file holds.
        target_hidden_size: Width of one aux feature, and of a borrowed embedding.
        final_hidden: The feature is the target's last hidden state instead of aux layers (``use_aux_hidden_state: false``).
        aux: The target's layers that feed it.
        fc_norm, input_norm, fc_bias: Whether the projector has these parts; None = as the file holds them.
        attention_bias: The projections of q, k and v must have biases; otherwise as the file holds them.
        norm_before_residual: The residual of the first layer is the normed feature, not the feature.
        norm_output: The next step's feature is the normed state.
    """

    layer: HeadConfig
    draft_vocab_size: int | None
    hot_vocab_size: int | None
    borrows_lm_head: bool
    target_hidden_size: int
    final_hidden: bool
    aux: AuxLayers
    fc_norm: bool | None
    input_norm: bool | None
    fc_bias: bool | None
    attention_bias: bool
    norm_before_residual: bool
    norm_output: bool

    @classmethod
    def from_dir(cls, path: Path) -> Eagle3Config:
        """Read a folder's configuration.

        Raises:
            CheckpointError: something is missing or not supported; `field` names the key.
        """
        return cls.parse(read_head_config(path), config_file(path))

    @classmethod
    def parse(cls, raw: Mapping[str, Any], source: Path | str = CONFIG_FILE) -> Eagle3Config:
        """Parse a configuration that is already read; `source` is named in errors."""
        flat = flatten(raw, source)
        reader = ConfigReader(flat, source)
        layer = HeadConfig.parse(reader)
        draft_vocab_size = reader.positive("draft_vocab_size", 0) or None
        if draft_vocab_size is not None and draft_vocab_size > layer.vocab_size:
            raise reader.error(
                "draft_vocab_size", f"{draft_vocab_size} is above vocab_size {layer.vocab_size}"
            )
        target_hidden_size = reader.positive("target_hidden_size", layer.hidden_size)
        final_hidden = not reader.flag("use_aux_hidden_state", True)
        if final_hidden and target_hidden_size != layer.hidden_size:
            raise reader.error(
                "use_aux_hidden_state",
                "false needs a head as wide as the target: its last hidden state is not projected",
            )
        check_eagle3(reader, layer.num_layers, final_hidden=final_hidden)
        return cls(
            layer=layer,
            draft_vocab_size=draft_vocab_size,
            hot_vocab_size=reader.positive("hot_vocab_size", 0) or None,
            borrows_lm_head="draft_vocab_size" in raw
            and draft_vocab_size is None
            and target_hidden_size == layer.hidden_size,
            target_hidden_size=target_hidden_size,
            final_hidden=final_hidden,
            aux=AuxLayers.parse(reader),
            fc_norm=_optional_flag(reader, "fc_norm", "use_aux_norm"),
            input_norm=_optional_flag(reader, "norm_before_fc"),
            fc_bias=_optional_flag(reader, "bias"),
            attention_bias=reader.flag("attention_bias", False),
            norm_before_residual=reader.flag("norm_before_residual", False),
            norm_output=reader.flag("norm_output", False),
        )

    def aux_convention(self, target: TargetInfo) -> AuxConvention:
        """Return how the file counts the aux layers of a target."""
        return self.aux.convention(target, latent=self.layer.latent is not None)

    def aux_naming(self, outputs: tuple[int, ...], target: TargetInfo) -> tuple[int, ...] | None:
        """Return the ids that this file must hold to read the outputs of these layers of a target; None: it cannot name them."""
        return self.aux.naming(outputs, target, latent=self.layer.latent is not None)

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
        return self.aux.outputs(target, self.aux_convention(target))


def _optional_flag(reader: ConfigReader, *names: str) -> bool | None:
    """Return whether one of the flags is set; None when none of them is there."""
    given = [reader.flag(name, False) for name in names if reader.raw.get(name) is not None]
    return any(given) if given else None
