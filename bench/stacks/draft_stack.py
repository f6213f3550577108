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
from outrider.kernels.packed_round import GroupRows
from outrider.services.draft.inproc import drafter_beside
from outrider.services.draft.settings import DraftSettings
from outrider.shared.base.errors import UnavailableError
from outrider.shared.nn.decoder import Decoder
from outrider.shared.spec.drafter import SequenceOpen
from outrider.shared.spec.fence import FNV_OFFSET, Fence, extend_prefix_hash
from outrider.shared.spec.tree import DraftBatch, DraftShape

SPARE_TOKENS = 512


@contextmanager
def drafting_round(
    decoder: Decoder, shape: NamedShape, tree: DraftShape, batch: int, context: int
) -> Iterator[Callable[[], DraftBatch]]:
    """Set up drafting for `batch` random sequences, and yield a function that enqueues one round of drafting.

    Each sequence has `context` tokens. A round extends the draft's K/V by one new row for each sequence,
    grows the draft trees and returns them. The yielded function may be called repeatedly, because every call
    writes to the same cache positions.

    Raises:
        UnavailableError: The draft does not support rounds that stay on this device.
    """
    # 1. Write a random head, and load it into this process beside the target.
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
        # 2. Open the sequences, and store their prompts in the draft's cache.
        columns, device = tree.depth + 1, decoder.device
        sessions = list(range(1, batch + 1))
        for session in sessions:
            tokens = [draw.randrange(decoder.config.vocab_size) for _ in range(context)]
            fence = Fence(session, 1, context, extend_prefix_hash(FNV_OFFSET, tokens))
            drafter.open([SequenceOpen(fence, tokens, seed=session, temperature=0.0)])
            drafter.features(session, 0, _features(decoder, context - 1))
        if drafter.on_device is None:
            raise UnavailableError("The draft does not support device-resident rounds on this device.")
        drafter.catch_up(sessions)
        # 3. Seat the sequences in a round, as if the previous round had chosen one token for each of them.
        seated = drafter.seat(sessions, [context + 1] * batch, tree.bounded(), batch, columns)
        if seated.refused:
            raise UnavailableError("The draft's cache is too small for these sequences.")
        rows = GroupRows(
            committed_lens=torch.full((batch,), context + 1, dtype=torch.int32, device=device),
            counts=torch.ones(batch, dtype=torch.int32, device=device),
            tokens=torch.ones((batch, columns), dtype=torch.int32, device=device),
            features=_features(decoder, batch * columns).view(batch, columns, -1),
            temperature=torch.zeros(batch, device=device),
            seeds=torch.zeros(batch, dtype=torch.int64, device=device),
            choices=torch.zeros(batch, dtype=torch.int32, device=device),
        )
        seated.load()
        yield lambda: seated.draft(rows)
    finally:
        drafter.shutdown()


def _features(decoder: Decoder, rows: int) -> torch.Tensor:
    """Return random feature rows, ``[rows, hidden_size]`` in the decoder's dtype."""
    return torch.randn(rows, decoder.config.hidden_size, device=decoder.device).to(decoder.dtype)
