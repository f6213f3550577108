"""Drafting on the target's device, in stream order, before the host has read the last round."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Protocol

import torch

from outrider.kernels.packed_round import GroupRows
from outrider.shared.spec.tree import DraftBatch, DraftShape


class SeatedGroup(Protocol):
    """Draft sessions that draft together in one round, with the same tree shape.

    Attributes:
        key: Identifies the drafter's static tensors and everything else that a CUDA graph of `draft` depends
            on. Only the sizes passed to `DeviceDrafter.seat` are not part of the key.
        refused: Indices of sessions that cannot draft in this round, because memory is short.
    """

    key: Hashable
    refused: Sequence[int]

    def load(self) -> None:
        """Write the group's page table, in stream order. Call before `draft` or the replay of its graph."""
        ...

    def draft(self, rows: GroupRows) -> DraftBatch:
        """Enqueue one round of drafting: process the sessions' new tokens and features, then grow the trees.

        ``rows.counts`` is the number of new tokens of each session. There is one new feature row per new
        token.

        A CUDA graph must be able to capture this method. An implementation must therefore not synchronise
        with the host or branch on the contents of tensors. During a capture, all rows are idle. The method
        must then not write data that a later call would read.

        Returns:
            One tree for each of the group's G rows, in tensors ``[G, N]``. N is the tree shape's `max_nodes`,
            and node 0 of a tree is the root. Idle rows have ``num_nodes`` 1. `DraftBatch.logprobs` may be
            None.
        """
        ...


class DeviceDrafter(Protocol):
    """Interface of a drafter that drafts on the target's device, in stream order. For the engine thread only.

    The tokens and feature rows of one round stay on the device, as input of the next round. A round can
    therefore be drafted before the host has read the results of the previous round. A session that did not
    draft in the last round lacks feature rows. `lacking` returns the positions of the missing rows.
    `catch_up` processes these rows, so that the session can draft again.
    """

    def lacking(self, session_id: int) -> range | None:
        """Return the positions of the feature rows that a draft session lacks and needs before it can draft.

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
        """Prepare draft sessions for one round: reserve the memory that they need.

        Args:
            session_ids: The sessions. Session i drafts in row i of the group. If there are no sessions, all
                rows are idle, and the group serves only to record its graph.
            committed_upper: For each session, an upper bound of the number of its committed tokens at the
                start of the round.
            shape: Shape of every tree.
            batch_size: G, the number of rows of the group. Rows after the sessions are idle.
            columns: Largest number of tokens that the last round may have added to a session.
        """
        ...

    def committed(self, session_id: int, tokens: Sequence[int], *, drafted: bool) -> None:
        """Pass to the drafter the tokens that a verify pass chose for a session, once the host has read them.

        Args:
            session_id: The session. Unknown sessions are ignored.
            tokens: The chosen tokens. Tokens after the end of the sequence are left out.
            drafted: True if the session had a draft tree in this pass.
        """
        ...
