"""Builds a draft alone, with random weights, to time a round of drafting as the engine runs it."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from outrider.bench.stacks.random_head import memory_folder, write_random_head
from outrider.bench.stacks.shapes import NamedShape
from outrider.services.draft.inproc import InprocDrafter, drafter_beside
from outrider.services.draft.settings import DraftSettings
from outrider.shared.base.errors import UnavailableError
from outrider.shared.nn.decoder import Decoder
from outrider.shared.spec.drafter import Commit, Commits, ProposalRequest, ProposalRow, SequenceOpen
from outrider.shared.spec.fence import FNV_OFFSET, Fence, extend_prefix_hash
from outrider.shared.spec.resident import RoundState
from outrider.shared.spec.tree import DraftBatch, DraftShape

SPARE_TOKENS = 512


@contextmanager
def drafting_round(
    decoder: Decoder, shape: NamedShape, tree: DraftShape, batch: int, context: int
) -> Iterator[Callable[[], DraftBatch]]:
    """Open `batch` sequences of `context` random tokens, and yield a function that enqueues a round for them.

    A round extends the draft by one new row for each sequence, grows the trees and returns the trees. A round
    may be repeated, because every repetition writes to the same cache positions.

    Raises:
        UnavailableError: The draft does not support device-resident rounds here.
    """
    # 1. Write a random head, and load the head beside the target.
    draw = random.Random(1)
    with tempfile.TemporaryDirectory(prefix="outrider-head-", dir=memory_folder()) as folder:
        head = write_random_head(Path(folder), shape, decoder.device, decoder.dtype)
        scratch = tree.depth * tree.topk + SPARE_TOKENS
        settings = {
            "draft": head,
            "max_sessions": max(batch, 16),
            "kv_tokens": max(batch, 16) * (context + scratch),
        }
        drafter = drafter_beside(decoder, DraftSettings.load(settings))
    try:
        # 2. Open the sequences and commit their prompts.
        state = RoundState.idle(
            batch, tree.depth + 1, decoder.config.hidden_size, decoder.dtype, decoder.device
        )
        sessions = range(1, batch + 1)
        rows = []
        for session in sessions:
            tokens = [draw.randrange(decoder.config.vocab_size) for _ in range(context)]
            features = torch.randn(context, decoder.config.hidden_size, device=decoder.device).to(
                decoder.dtype
            )
            fence = Fence(session, 1, context, extend_prefix_hash(FNV_OFFSET, tokens))
            drafter.open([SequenceOpen(fence, tokens, seed=session, temperature=0.0)])
            drafter.features(session, 0, features[:-1])
            rows.append(_commit(drafter, fence, tokens[-1], features[-1:], tree))
        # This proposal stores the prompts in the draft's cache.
        drafter.propose(ProposalRequest(0, rows, None))
        for session, row in zip(sessions, rows, strict=True):
            fresh = torch.randn(1, decoder.config.hidden_size, device=decoder.device).to(decoder.dtype)
            _commit(drafter, row.fence, session, fresh, tree)
        # 3. Move the sequences into device-resident rounds.
        state.committed_lens.fill_(context + 2)
        rounds = drafter.enter(list(sessions), tree, state) if drafter.device_resident else None
        if rounds is None or not rounds.reserve([context + 2] * batch):
            raise UnavailableError("The draft does not support device-resident rounds on this device.")
        yield lambda: rounds.draft(state)
        rounds.leave()
    finally:
        drafter.shutdown()


def _commit(
    drafter: InprocDrafter, before: Fence, token: int, features: torch.Tensor, tree: DraftShape
) -> ProposalRow:
    """Commit one more token to the drafter, and return the row that requests a tree after this token."""
    fence = Fence(
        before.session_id,
        before.epoch,
        before.committed_len + 1,
        extend_prefix_hash(before.prefix_hash, [token]),
    )
    drafter.commit(Commits(0, [Commit(fence, before.committed_len, [token], features)]))
    return ProposalRow(fence, token, tree, must_wait=True)
