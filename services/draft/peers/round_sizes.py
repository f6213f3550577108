"""Reads a request for rounds on the device: which sizes it needs, and what its rows start from."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from outrider.draft.v1 import draft_pb2
from outrider.services.draft.sessions.feature_queue import FeatureQueue
from outrider.services.draft.sessions.session import Session
from outrider.shared.spec.resident import RoundState
from outrider.shared.spec.seeds import signed_seed


def kind_of(message: draft_pb2.RoundsEnter) -> tuple[int, int, int, int, int]:
    """Return the batch size, the columns and the tree shape of the rounds."""
    return message.batch, message.columns, message.shape.depth, message.shape.topk, message.shape.max_nodes


def length_class_of(message: draft_pb2.RoundsEnter) -> int:
    """Return a class of similar sequence lengths. A higher class may need wider tables and other graphs."""
    return max((row.fence.committed_len for row in message.rows), default=0).bit_length()


def size_of(message: draft_pb2.RoundsEnter) -> tuple[int, int, int]:
    """Return the sizes of the state and the trees: batch size, columns, nodes."""
    return message.batch, message.columns, message.shape.max_nodes


def tell_pending(session: Session, row: draft_pb2.Commit, now: float) -> None:
    """Append the tokens by which the first round extends. The first state contains their features."""
    session.ask = None
    session.tokens.extend(row.token_ids)
    session.prefix_hash = row.fence.prefix_hash
    session.features = FeatureQueue(session.cached_rows)
    session.last_used_s = now


def load_sampling(state: RoundState, sessions: Sequence[Session]) -> None:
    """Fill the fields of a state that do not change from round to round."""
    signed = [signed_seed(session.seed) for session in sessions]
    for field, values in (
        (state.temperature, [session.temperature for session in sessions]),
        (state.seeds, signed),
        (state.choices, [session.choice_index for session in sessions]),
    ):
        host = torch.tensor(values, dtype=field.dtype)
        # Pinned, because a copy from pageable memory would block the host until the prompts' passes are over.
        field[: len(sessions)].copy_(host.pin_memory() if field.is_cuda else host, non_blocking=True)
