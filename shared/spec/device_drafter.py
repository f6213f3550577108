"""Drafting on the target's device, in stream order, before the host has read the last round."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Protocol

import torch

from outrider.kernels.packed_round import GroupRows
from outrider.shared.spec.tree import DraftBatch, DraftShape


class SeatedGroup(Protocol):
    """Sessions that draft together in one round, with one tree shape.

    Attributes:
        key: Identifies everything that a recorded graph of `draft` depends on, except the sizes that were
            passed to `seat`. The key also identifies the addresses of the drafter's static tensors.
        refused: Indices of sessions that cannot draft in this round, because memory is short.
    """

    key: Hashable
    refused: Sequence[int]

    def load(self) -> None:
        """Write the group's page table, in stream order. Call before `draft` or the replay of its graph."""
        ...

    def draft(self, rows: GroupRows) -> DraftBatch:
        """Enqueue one round of drafting: process the sessions' new tokens and features, then grow the trees.

        For each session, `rows.counts` is the number of new tokens and features.

        A CUDA graph must be able to capture this method. It never synchronises with the host or branches on
        the contents of tensors. During a capture, all rows are idle, and this method must not write data that
        a later call would read.

        Returns:
            ``[G, N]`` trees, where N is the shape's `max_nodes` and node 0 is the root. Idle rows have
            ``num_nodes`` 1. `DraftBatch.logprobs` may be None.
        """
        ...


class DeviceDrafter(Protocol):
    """The part of a `Drafter` that drafts on the target's device, in stream order. Engine thread only.

    The tokens and features of one round are the next round's input on the device, so a round is drafted
    before the host has read the previous one. A session that did not draft in the last round lacks feature
    rows. `lacking` returns their positions, and `catch_up` processes them, so that the session can draft
    again.
    """

    def lacking(self, session_id: int) -> range | None:
        """Return the positions of the feature rows that a session needs before it can draft.

        Returns:
            A range of positions, which is empty if no row is missing. None if the session is unknown.
        """
        ...

    def features(self, session_id: int, base: int, rows: torch.Tensor) -> None:
        """Receive the feature rows that a session lacks; see `Drafter.features`."""
        ...

    def catch_up(self, session_ids: Sequence[int]) -> None:
        """Enqueue the work on all rows that these sessions have received. Does not wait."""
        ...

    def seat(
        self,
        session_ids: Sequence[int],
        committed_upper: Sequence[int],
        shape: DraftShape,
        batch_size: int,
        columns: int,
    ) -> SeatedGroup:
        """Prepare sessions for one round: reserve the memory that they need.

        Args:
            session_ids: The sessions. Session i drafts in row i of the group. If there are no sessions, all
                rows are idle, and the group serves only to record its graph.
            committed_upper: For each session, an upper bound of the number of its committed tokens at the
                start of the round.
            shape: Shape of every tree.
            batch_size: G, the number of rows of the group. Rows after the sessions are idle.
            columns: Largest number of tokens that a session may have chosen in the last round.
        """
        ...

    def committed(self, session_id: int, tokens: Sequence[int], *, drafted: bool) -> None:
        """Receive the tokens that a pass chose, after the host has read them.

        Args:
            session_id: The session. Unknown sessions are ignored.
            tokens: The tokens, without tokens after a stop.
            drafted: True if the session drafted in that round.
        """
        ...
