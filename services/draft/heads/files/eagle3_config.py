"""Parses an EAGLE-3 head's configuration, in every published dialect, and checks that it fits the target.

The module `aux_layers` parses the keys of the feature layers. The module `eagle3_sizes` compares the
configuration with the shapes of the head's tensors.
"""

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
    """The configuration of an EAGLE-3 head, parsed from the head's config.json.

    Attributes:
        layer: The head's decoder layers. ``layer.vocab_size`` is the size of the target's vocabulary.
        draft_vocab_size: Number of rows of the head's lm_head. None if the file does not contain the number.
        hot_vocab_size: Number of frequent tokens that the head drafts (FR-Spec). The tensor ``hot_token_id``
            or a token map lists these tokens. With None, the head drafts all tokens.
        borrows_lm_head: True if ``draft_vocab_size`` is null in the file. The head then uses the target's
            lm_head, even if the head's checkpoint contains an lm_head.
        target_hidden_size: Width of the feature of one aux layer, and of a borrowed embedding.
        final_hidden: True if the feature is the target's last hidden state and not the states of aux layers
            (``use_aux_hidden_state: false``).
        aux: The aux layers: the target's layers that feed the head.
        fc_norm, input_norm, fc_bias: Whether the projector of features has these parts. With None, the
            tensors in the checkpoint decide.
        attention_bias: True if the projections of q, k and v must have biases. With False, the tensors in the
            checkpoint decide.
        norm_before_residual: True if the residual of the first layer is the normed feature instead of the raw
            feature.
        norm_output: True if the next step's feature is the normed state.
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
        """Read the configuration in a head's folder.

        Raises:
            CheckpointError: A key is missing or not supported; `field` names the key.
        """
        return cls.parse(read_head_config(path), config_file(path))

    @classmethod
    def parse(cls, raw: Mapping[str, Any], source: Path | str = CONFIG_FILE) -> Eagle3Config:
        """Parse a configuration that was already read. Errors name `source`."""
        flat = flatten(raw, source)
        reader = ConfigReader(flat, source)
        layer = HeadConfig.parse(reader)
        draft_vocab_size = reader.positive("draft_vocab_size", 0) or None
        if draft_vocab_size is not None and draft_vocab_size > layer.vocab_size:
            raise reader.error(
                "draft_vocab_size", f"{draft_vocab_size} is larger than vocab_size, {layer.vocab_size}"
            )
        target_hidden_size = reader.positive("target_hidden_size", layer.hidden_size)
        final_hidden = not reader.flag("use_aux_hidden_state", True)
        if final_hidden and target_hidden_size != layer.hidden_size:
            raise reader.error(
                "use_aux_hidden_state",
                "false needs target_hidden_size = hidden_size: the last hidden state is not projected",
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
        """Return whether the file's ids stand for outputs or inputs of this target's layers."""
        return self.aux.convention(target, latent=self.layer.latent is not None)

    def aux_naming(self, outputs: tuple[int, ...], target: TargetInfo) -> tuple[int, ...] | None:
        """Return the ids that name the outputs of these layers in this file; None if no such ids exist."""
        return self.aux.naming(outputs, target, latent=self.layer.latent is not None)

    def check_target(self, target: TargetInfo) -> tuple[int, ...]:
        """Check that the head fits a target, and return the target's layers whose outputs feed the head.

        Returns:
            The aux layers. The result is empty if the head reads the target's last hidden state.

        Raises:
            CheckpointError: The head was made for another target. The message names the key and both values.
        """
        self.layer.check_vocabulary(target)
        if target.hidden_size != self.target_hidden_size:
            key = "target_hidden_size" if self.target_hidden_size != self.layer.hidden_size else "hidden_size"
            raise CheckpointError(
                f"The head reads features of hidden size {self.target_hidden_size} ({key}), but the target's "
                f"hidden size is {target.hidden_size}: {SERVE_ANOTHER}.",
                field=key,
            )
        if self.final_hidden:
            return ()
        return self.aux.outputs(target, self.aux_convention(target))


def _optional_flag(reader: ConfigReader, *names: str) -> bool | None:
    """Return whether any of the flags is set, or None if the file contains none of them."""
    given = [reader.flag(name, False) for name in names if reader.raw.get(name) is not None]
    return any(given) if given else None
