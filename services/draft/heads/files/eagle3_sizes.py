"""Compares an EAGLE-3 head's config.json with its tensors: hidden_size, vocab_size, number of aux layers.

Each difference is reported in a single sentence, instead of as a long list of misshaped tensors. The ids of
the aux layers are checked elsewhere (`aux_layers`).
"""

from __future__ import annotations

from collections.abc import Mapping

from outrider.services.draft.heads.files.aux_layers import NUM_AUX_KEY
from outrider.services.draft.heads.files.eagle3_config import Eagle3Config
from outrider.shared.base.errors import CheckpointError
from outrider.shared.nn.checkpoint.checkpoint_reader import CheckpointReader


def check_sizes(reader: CheckpointReader, config: Eagle3Config, actual: Mapping[str, str]) -> None:
    """Compare the sizes in an EAGLE-3 head's configuration with the shapes of the head's tensors.

    Args:
        reader: Reader of the head's checkpoint.
        config: The parsed config.json.
        actual: Maps the canonical name of each tensor to the tensor's name in the file.

    Raises:
        CheckpointError: A size differs. The message names the key, the tensor and both numbers.
    """

    def size(name: str, axis: int, num_axes: int) -> int | None:
        shape = reader.tensors[actual[name]].shape if name in actual else ()
        return shape[axis] if len(shape) == num_axes else None

    layer = config.layer
    checks = (
        ("hidden_size", layer.hidden_size, "norm.weight", size("norm.weight", 0, 1)),
        ("vocab_size", layer.vocab_size, "t2d", size("t2d", 0, 1)),
        ("vocab_size", layer.vocab_size, "embed_tokens.weight", size("embed_tokens.weight", 0, 2)),
    )
    for key, said, name, found in checks:
        if found not in (None, said):
            raise CheckpointError(
                f"{reader.path}: {key} is {said} in config.json, but {found} in the tensor {actual[name]}. "
                "The config.json belongs to another head; download both again.",
                field=key,
            )
    if config.final_hidden:  # fc is not used
        return
    inputs, found = config.aux.count * config.target_hidden_size, size("fc.weight", 1, 2)
    if found not in (None, inputs):
        raise CheckpointError(
            f"{reader.path}: {actual['fc.weight']} has {found} inputs, but config.json needs {inputs}: "
            f"{config.aux.count} aux layers of {config.target_hidden_size}. Correct num_aux_hidden_states, "
            "eagle_aux_hidden_state_layer_ids or target_hidden_size.",
            field=actual["fc.weight"] if config.aux.contradicted is None else NUM_AUX_KEY,
        )
