"""One session through the whole engine before anybody is served: compiles kernels, touches memory, and proves that nothing leaks."""

from __future__ import annotations

import torch

from outrider.services.draft.engine import DraftEngine
from outrider.services.draft.session import Ask, PeerId
from outrider.shared.base.errors import CheckpointError
from outrider.shared.spec.drafter import Commit, SequenceOpen
from outrider.shared.spec.fence import FNV_OFFSET, Fence, extend_prefix_hash
from outrider.shared.spec.tree import DraftShape

WARM_UP_PEER = PeerId(0)
PROMPT_LEN = 20
PERIOD = 7
"""The made-up sequence repeats itself, so that n-grams have something to find."""
SHAPES = (DraftShape(5, 4, 16), DraftShape(5, 1, 6))


def warm_up(engine: DraftEngine) -> None:
    """Follow one made-up sequence and grow trees of the default shapes.

    Raises:
        CheckpointError: the draft's output is not finite: its weights are damaged, or its dtype is too narrow.
    """
    info, limits = engine.strategy.info, engine.sessions.limits
    tokens = [index % min(PERIOD, info.vocab_size) for index in range(PROMPT_LEN)]
    fence = Fence(0, 1, len(tokens), extend_prefix_hash(FNV_OFFSET, tokens))
    engine.open(WARM_UP_PEER, SequenceOpen(fence, tokens, seed=0, temperature=1.0))
    if info.feature_size:
        engine.add_features(WARM_UP_PEER, 0, 1, 0, torch.ones(PROMPT_LEN - 1, info.feature_size))
    for shape in SHAPES:
        most = limits.max_shape
        fitting = DraftShape(min(shape.depth, most.depth), min(shape.topk, most.topk), min(shape.max_nodes, most.max_nodes))
        engine.commit(WARM_UP_PEER, Commit(fence, len(tokens), (), None), Ask(0, fitting, asked_s=0.0))
        for proposal in engine.step().proposals:
            if fitting.bounded().drafts and int(proposal.trees.num_nodes[0]) < 2:
                raise CheckpointError(
                    f"{info.model_id}: its logits are not finite; its weights are damaged, or --dtype is too narrow.",
                    field="draft",
                )
    engine.drop_peer(WARM_UP_PEER)
    engine.check()
