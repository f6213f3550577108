"""FR-Spec heads: the frequent tokens come with the head (``hot_token_id``), or by a token map. Source: arXiv 2502.14856, SGLang."""

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
    """Return the target ids that alone are drafted, ``[size] int64`` in the order of the head's rows; None = all.

    Args:
        reader, keys: Of the head.
        token_map: What `--speculative-token-map` names, or None.
        hot_size: ``hot_vocab_size`` of its configuration, or None.
        vocab_size: The target's.

    Raises:
        CheckpointError: the three contradict each other, or ids are no distinct ones of the vocabulary.
    """
    ids = keys.take_stored(reader, HOT_IDS).to(torch.int64) if HOT_IDS in keys else token_map
    if ids is None:
        if hot_size is None:
            return None
        raise CheckpointError(
            f"{reader.path}: {HOT_SIZE} is {hot_size}, and the file holds no {HOT_IDS}: give the map by --speculative-token-map, or remove "
            "the key to draft with the full vocabulary.",
            field=HOT_SIZE,
        )
    if token_map is not None and not torch.equal(token_map.sort().values, ids.sort().values):
        raise CheckpointError(
            f"{reader.path}: the head names its own frequent tokens ({HOT_IDS}), the token map others; leave --speculative-token-map out.",
            field="speculative_token_map",
        )
    if hot_size is not None and ids.shape[0] != hot_size:
        source = HOT_IDS if HOT_IDS in keys else "the token map"
        raise CheckpointError(
            f"{reader.path}: {HOT_SIZE} is {hot_size}, and {source} names {ids.shape[0]} tokens.",
            field=HOT_SIZE,
        )
    if HOT_IDS in keys and (
        int(ids.min()) < 0 or int(ids.max()) >= vocab_size or len(set(ids.tolist())) != ids.shape[0]
    ):
        raise CheckpointError(
            f"{reader.path}: {HOT_IDS} must hold distinct ids below {vocab_size}; export the head again.",
            field=HOT_IDS,
        )
    return ids
