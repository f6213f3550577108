"""Selects the target layers that feed an EAGLE-3 head; requires layer ids unless there are three layers.

A head's configuration may contain the number of feature layers (``num_aux_hidden_states``) without a list of
their ids. Default layers exist only for three layers, so `AuxLayers.outputs` refuses every other number.
`eagle3_config` parses all other keys, and `eagle3_sizes` compares the number of layers with the tensors.

The module also decides whether an id i stands for the output or for the input of layer i. The wrong choice
silently lowers the accept length. The rule is SGLang's (`set_eagle3_layers_to_capture`): ids stand for
outputs of layers, except in two cases, where they stand for inputs:

- The last id equals the number of the target's layers, as in heads for gpt-oss.
- The target is a DeepSeek or Kimi model, and the ids do not begin with 1.
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
"""Prefixes of the model types of targets for which ids stand for inputs, unless the ids begin with 1."""


class AuxConvention(Enum):
    """Whether ids of aux layers stand for outputs or inputs. Logs and the doctor's report show the values."""

    DEFAULT = "not named: the inputs of layers 2, L//2 and L - 3"
    OUTPUTS = "ids count outputs"
    INPUTS_TO_THE_END = "ids count inputs, since the last is the target's number of layers"
    INPUTS_BY_FAMILY = "ids count inputs, as they do for DeepSeek and Kimi targets unless they begin with 1"


@dataclass(frozen=True, slots=True)
class AuxLayers:
    """The aux layers of an EAGLE-3 head: the target's layers whose hidden states feed the head.

    Attributes:
        count: Number of aux layers.
        ids: The ids of the layers as in the head's configuration, in ascending order. None for the three
            default layers.
        contradicted: The list of ids in the configuration if its length differs from
            ``num_aux_hidden_states``; otherwise None.
    """

    count: int
    ids: tuple[int, ...] | None
    contradicted: tuple[int, ...] | None = None

    @classmethod
    def parse(cls, reader: ConfigReader) -> AuxLayers:
        """Read the number of aux layers and the list of their ids from a head's configuration.

        If the list is longer than the number, only the first ids are used. If the list is shorter, the number
        must be three. The three default layers are then used.

        Raises:
            CheckpointError: The list is malformed, or it is too short and the number is not three.
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
    def summary(self) -> str:
        """A summary of the layers for the log, for use before the target is known."""
        named = (
            "the default triple"
            if self.ids is None
            else f"layers {list(self.ids)}; the target decides if they are outputs or inputs"
        )
        return (
            named
            if self.contradicted is None
            else f"{named} ({NUM_AUX_KEY} {self.count} overrides the list {list(self.contradicted)})"
        )

    def convention(self, target: TargetInfo, *, latent: bool) -> AuxConvention:
        """Return whether the configured layer ids stand for outputs or for inputs of this target's layers.

        Args:
            target: The target.
            latent: True if the head has latent attention. Such a head belongs to the DeepSeek or Kimi family.
                This argument matters only for a target of an older version, which does not report its model
                type.
        """
        if self.ids is None:
            return AuxConvention.DEFAULT
        if self.ids[0] > 0 and self.ids[-1] == target.num_layers:
            return AuxConvention.INPUTS_TO_THE_END
        of_family = target.model_type.startswith(INPUT_COUNTING_FAMILIES) if target.model_type else latent
        return AuxConvention.INPUTS_BY_FAMILY if of_family and self.ids[0] != 1 else AuxConvention.OUTPUTS

    def outputs(self, target: TargetInfo, convention: AuxConvention) -> tuple[int, ...]:
        """Return the target's layers whose outputs the target captures for the head, in ascending order.

        Raises:
            CheckpointError: The target lacks one of the layers, or the head's configuration does not name
                the layers. The second case is an error only if no default layers exist for their number or
                for this target.
        """
        if self.ids is None:
            return self._default(target.num_layers)
        shift = convention in (AuxConvention.INPUTS_TO_THE_END, AuxConvention.INPUTS_BY_FAMILY)
        outputs = tuple(layer - shift for layer in self.ids)
        if outputs[0] < 0 or outputs[-1] >= target.num_layers:
            raise CheckpointError(
                f"The head reads layers {list(self.ids)} ({convention.value}), but the target has only "
                f"{target.num_layers} layers: {SERVE_ANOTHER}; or correct {AUX_KEY} in the "
                "head's config.json.",
                field=AUX_KEY,
            )
        return outputs

    def naming(self, outputs: tuple[int, ...], target: TargetInfo, *, latent: bool) -> tuple[int, ...] | None:
        """Return the layer ids with which a head's configuration names the outputs of the given layers.

        The result is None if no ids can name these outputs. An example is the output of layer 0 of a DeepSeek
        or Kimi target, which is the input of layer 1. For these targets, a list of ids that begins with 1
        stands for outputs, unless the last layer is named too.
        """
        for ids in (outputs, tuple(layer + 1 for layer in outputs)):
            layers = AuxLayers(len(ids), ids)
            try:
                if layers.outputs(target, layers.convention(target, latent=latent)) == outputs:
                    return ids
            except CheckpointError:  # the target lacks a layer that these ids name
                continue
        return None

    def _default(self, num_layers: int) -> tuple[int, ...]:
        if self.count != DEFAULT_NUM_AUX:
            raise CheckpointError(
                f"The head reads {self.count} layers without naming them; add {AUX_KEY} to its config.json.",
                field=AUX_KEY,
            )
        if num_layers < MIN_LAYERS_FOR_DEFAULT_AUX:
            raise CheckpointError(
                f"The default aux layers need a target of at least {MIN_LAYERS_FOR_DEFAULT_AUX} layers, but "
                f"this one has {num_layers}. Name the layers by {AUX_KEY} in the head's config.json.",
                field=AUX_KEY,
            )
        # The official code captures the inputs of layers 2, L // 2 and L - 3. These are the outputs of the
        # preceding layers.
        return (1, num_layers // 2 - 1, num_layers - 4)


def _listed(reader: ConfigReader) -> tuple[int, ...] | None:
    value = reader.raw.get(AUX_KEY)
    if value is None or value == []:  # ModelOpt writes an empty list to request the default triple
        return None
    valid = isinstance(value, list) and all(
        isinstance(layer, int) and not isinstance(layer, bool) for layer in value
    )
    if not valid or value != sorted(set(value)) or value[0] < 0:
        raise reader.error(AUX_KEY, f"must list layers in ascending order, not {value!r}")
    return tuple(value)
