"""Reads the frequent tokens that an FR-Spec head drafts, from the head's ``hot_token_id`` or a token map.

Sources: FR-Spec (arXiv 2502.14856) and SGLang.
"""

from __future__ import annotations

import torch

from outrider.services.draft.heads.files.keys import HeadKeys
from outrider.shared.base.errors import CheckpointError
from outrider.shared.nn.checkpoint.checkpoint_reader import CheckpointReader

HOT_IDS = "hot_token_id"
HOT_SIZE = "hot_vocab_size"


def take_hot_ids(
    reader: CheckpointReader,
    keys: HeadKeys,
    token_map: torch.Tensor | None,
    hot_size: int | None,
    vocab_size: int,
) -> torch.Tensor | None:
    """Return the target ids that a head may draft, ``[size] int64`` in lm_head row order, or None.

    None means that the head drafts all target ids.

    Args:
        reader: Reader of the head's checkpoint.
        keys: The head's tensors.
        token_map: The ids in the file that ``--speculative-token-map`` names. None if the flag is not given.
        hot_size: The value of ``hot_vocab_size`` in the head's configuration. None if the key is missing.
        vocab_size: Size of the target's vocabulary.

    Raises:
        CheckpointError: The tensor `hot_token_id`, `token_map` and `hot_size` contradict each other, or ids
            are repeated or out of range.
    """
    ids = keys.take_stored(reader, HOT_IDS).to(torch.int64) if HOT_IDS in keys else token_map
    if ids is None:
        if hot_size is None:
            return None
        raise CheckpointError(
            f"{reader.path}: {HOT_SIZE} is {hot_size}, but the file has no tensor {HOT_IDS}. Give the token "
            "map by --speculative-token-map, or remove the key to draft with the full vocabulary.",
            field=HOT_SIZE,
        )
    if token_map is not None and not torch.equal(token_map.sort().values, ids.sort().values):
        raise CheckpointError(
            f"{reader.path}: the token map differs from the head's own frequent tokens ({HOT_IDS}). "
            "Leave out --speculative-token-map.",
            field="speculative_token_map",
        )
    if hot_size is not None and ids.shape[0] != hot_size:
        source = HOT_IDS if HOT_IDS in keys else "the token map"
        raise CheckpointError(
            f"{reader.path}: {HOT_SIZE} is {hot_size}, but {source} has {ids.shape[0]} tokens. Correct the "
            "key, or give the tokens that the head was made for.",
            field=HOT_SIZE,
        )
    if HOT_IDS in keys and (
        int(ids.min()) < 0 or int(ids.max()) >= vocab_size or len(set(ids.tolist())) != ids.shape[0]
    ):
        raise CheckpointError(
            f"{reader.path}: {HOT_IDS} must contain distinct ids below {vocab_size}. Export the head again.",
            field=HOT_IDS,
        )
    return ids
