"""Which layers of the target feed an EAGLE-3 head, and how its file counts them: mixing conventions up costs accept length silently.

The convention is SGLang's (`set_eagle3_layers_to_capture`): ids name outputs of layers; but for gpt-oss and where the last id is the number
of layers, and for DeepSeek and Kimi targets unless the ids begin with 1, they name inputs.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from outrider.services.draft.heads.files.head_config import SERVE_ANOTHER
from outrider.services.draft.target_info import TargetInfo
from outrider.shared.base.errors import CheckpointError
from outrider.shared.nn.config.model_config import ConfigReader

AUX_KEY = "eagle_aux_hidden_state_layer_ids"
NUM_AUX_KEY = "num_aux_hidden_states"
DEFAULT_NUM_AUX = 3
MIN_LAYERS_FOR_DEFAULT_AUX = 7
INPUT_COUNTING_FAMILIES = ("deepseek", "kimi")
"""Beginnings of the model types of targets whose ids count inputs unless they begin with 1."""


class AuxConvention(Enum):
    """What ids mean; the values are for logs and the doctor."""

    DEFAULT = "not named: the inputs of layers 2, L//2 and L - 3"
    OUTPUTS = "ids count outputs"
    INPUTS_TO_THE_END = "ids count inputs, since the last is the target's number of layers"
    INPUTS_BY_FAMILY = "ids count inputs, as they do for DeepSeek and Kimi targets unless they begin with 1"


@dataclass(frozen=True, slots=True)
class AuxLayers:
    """What a head's configuration says of the layers that feed it.

    Attributes:
        count: How many.
        ids: Which, ascending, as the file counts; None for the default triple.
        contradicted: The file's own list, where ``num_aux_hidden_states`` names another number, which goes first; else None.
    """

    count: int
    ids: tuple[int, ...] | None
    contradicted: tuple[int, ...] | None = None

    @classmethod
    def parse(cls, reader: ConfigReader) -> AuxLayers:
        """Read the keys. An explicit number goes before the length of the list: the list's first ones are taken, as many as that.

        Raises:
            CheckpointError: the list is malformed, or too short for a number that has no default.
        """
        ids = _listed(reader)
        count = reader.positive(NUM_AUX_KEY, len(ids) if ids else DEFAULT_NUM_AUX)
        if ids is None or len(ids) == count:
            return cls(count, ids)
        if len(ids) > count:
            return cls(count, ids[:count], ids)
        if count == DEFAULT_NUM_AUX:
            return cls(count, None, ids)
        raise reader.error(NUM_AUX_KEY, f"is {count}, but {AUX_KEY} names {len(ids)} layers; name {count}")

    @property
    def says(self) -> str:
        """What is known of them before the target is, for the log."""
        named = (
            "the default triple"
            if self.ids is None
            else f"layers {list(self.ids)}, outputs or inputs by the target"
        )
        return (
            named
            if self.contradicted is None
            else f"{named} ({NUM_AUX_KEY} {self.count} before the list {list(self.contradicted)})"
        )

    def convention(self, target: TargetInfo, *, latent: bool) -> AuxConvention:
        """Return what the ids mean for a target; of an older one that does not name its family a head with `latent` attention tells."""
        if self.ids is None:
            return AuxConvention.DEFAULT
        if self.ids[0] > 0 and self.ids[-1] == target.num_layers:
            return AuxConvention.INPUTS_TO_THE_END
        of_family = target.model_type.startswith(INPUT_COUNTING_FAMILIES) if target.model_type else latent
        return AuxConvention.INPUTS_BY_FAMILY if of_family and self.ids[0] != 1 else AuxConvention.OUTPUTS

    def outputs(self, target: TargetInfo, convention: AuxConvention) -> tuple[int, ...]:
        """Return the layers whose outputs are captured, ascending.

        Raises:
            CheckpointError: the target lacks one of them, or the file must name them.
        """
        if self.ids is None:
            return self._default(target.num_layers)
        shift = convention in (AuxConvention.INPUTS_TO_THE_END, AuxConvention.INPUTS_BY_FAMILY)
        outputs = tuple(layer - shift for layer in self.ids)
        if outputs[0] < 0 or outputs[-1] >= target.num_layers:
            raise CheckpointError(
                f"The head reads layers {list(self.ids)} ({convention.value}), the target has {target.num_layers}: {SERVE_ANOTHER}; or "
                f"correct {AUX_KEY}.",
                field=AUX_KEY,
            )
        return outputs

    def naming(self, outputs: tuple[int, ...], target: TargetInfo, *, latent: bool) -> tuple[int, ...] | None:
        """Return the ids by which a file has the outputs of these layers captured, or None where it cannot name them.

        For DeepSeek and Kimi targets no ids mean outputs that begin with layer 0: they would begin with 1, and then count outputs.
        """
        for ids in (outputs, tuple(layer + 1 for layer in outputs)):
            layers = AuxLayers(len(ids), ids)
            try:
                if layers.outputs(target, layers.convention(target, latent=latent)) == outputs:
                    return ids
            except CheckpointError:  # these ids mean layers that the target lacks
                continue
        return None

    def _default(self, num_layers: int) -> tuple[int, ...]:
        if self.count != DEFAULT_NUM_AUX:
            raise CheckpointError(
                f"The head reads {self.count} layers without naming them: add {AUX_KEY} to its config.json.",
                field=AUX_KEY,
            )
        if num_layers < MIN_LAYERS_FOR_DEFAULT_AUX:
            raise CheckpointError(
                f"The default aux layers need a target of at least {MIN_LAYERS_FOR_DEFAULT_AUX} layers, this one has {num_layers}: "
                f"name them by {AUX_KEY} in the head's config.json.",
                field=AUX_KEY,
            )
        # Outputs of these layers are the inputs of 2, L // 2 and L - 3, which is how the official code counts.
        return (1, num_layers // 2 - 1, num_layers - 4)


def _listed(reader: ConfigReader) -> tuple[int, ...] | None:
    value = reader.raw.get(AUX_KEY)
    if value is None or value == []:  # ModelOpt writes an empty list where the default triple is meant
        return None
    valid = isinstance(value, list) and all(
        isinstance(layer, int) and not isinstance(layer, bool) for layer in value
    )
    if not valid or value != sorted(set(value)) or value[0] < 0:
        raise reader.error(AUX_KEY, f"must list layers in ascending order, not {value!r}")
    return tuple(value)
