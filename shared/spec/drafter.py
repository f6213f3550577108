"""The interface between the engine and a drafter. The drafter may run on another host or in this process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

import torch

from outrider.shared.base.errors import OutriderError
from outrider.shared.spec.device_drafter import DeviceDrafter
from outrider.shared.spec.exchanged_slots import ExchangedSlots
from outrider.shared.spec.fence import Fence
from outrider.shared.spec.tree import DraftBatch, DraftShape


class DrafterState(Enum):
    """Whether a drafter can propose trees now.

    LATE means that the draft is slow and can only serve rows that must wait.
    """

    NONE = "none"
    CONNECTING = "connecting"
    ON = "on"
    LATE = "late"
    DOWN = "draft_down"


WARMING = "warming"
"""Fallback reason of a sequence whose rows have not all arrived at the draft, or are not processed yet."""
BACKING_OFF = "backing_off"
"""Fallback reason while the draft, which did not answer, gets no request until a back-off ends."""


@dataclass(frozen=True, slots=True)
class FeatureSpec:
    """The features that a drafter uses, and how the target turns its hidden states into these features.

    Attributes:
        aux_layer_ids: Layers whose *outputs* are concatenated, in ascending order. Empty if only the final
            hidden state is used.
        final_hidden: True if the feature is the last hidden state after the final norm (EAGLE-1/2, MTP).
        feature_size: Number of values in a stored feature row, after the projector if there is one. 0 if the
            drafter uses no features.
        projector: Tensors with which the target projects its hidden states: ``fc.weight`` ``[feature_size,
            n_aux * hidden]``, and optionally ``fc.bias``, ``fc_norm.N.weight`` and ``input_norm.weight``.
            Empty if the hidden states are sent unchanged.
        norm_eps: Epsilon of the projector's norms.
        fingerprint: Identifies the projector. Stored features are valid only for the projector with this
            fingerprint.
    """

    aux_layer_ids: tuple[int, ...] = ()
    final_hidden: bool = False
    feature_size: int = 0
    projector: Mapping[str, torch.Tensor] = field(default_factory=dict)
    norm_eps: float = 1e-5
    fingerprint: str = ""


@dataclass(frozen=True, slots=True)
class SequenceOpen:
    """A request to the drafter to open a session for a sequence, so that the sequence can use drafts.

    The sequence's features are sent with `Drafter.features`. Its first chosen token is sent with
    `Drafter.commit`.

    Attributes:
        fence: The sequence's fence. The fence's committed_len equals the number of `token_ids`.
        token_ids: All tokens committed so far: the prompt and, if the sequence is opened again, the tokens
            emitted after the prompt.
        seed, temperature, choice_index: Parameters of the target's sampling noise, for coupled drafting.
        traceparent: W3C trace context of the target's span for the request. Empty if the request is not
            traced.
        cache_salt: Text that separates sequences that must not share stored work. The drafter may store its
            K/V of this sequence, and reuse it only for sequences with the same salt. With None, the drafter
            stores and reuses nothing.
        stored_len: Number of leading tokens that the target has found in its prefix cache or has computed.
            For these tokens, the drafter may reuse K/V that it has stored for earlier sequences.
    """

    fence: Fence
    token_ids: Sequence[int]
    seed: int
    temperature: float
    choice_index: int = 0
    traceparent: str = ""
    cache_salt: str | None = None
    stored_len: int = 0


@dataclass(frozen=True, slots=True)
class Commit:
    """A commit: the tokens that one round chose for one sequence.

    Attributes:
        fence: The sequence's fence *after* the round.
        base_len: committed_len before the round.
        token_ids: The tokens at ``[base_len, fence.committed_len)``: accepted drafts, then the bonus token.
        features: ``[n, feature_size]``, the feature rows of positions ``[base_len - 1, fence.committed_len -
            1)``, on the target's device. None if the drafter uses no features.
    """

    fence: Fence
    base_len: int
    token_ids: Sequence[int]
    features: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class Commits:
    """All commits of one engine step.

    The first token after prefill is a commit whose ``base_len`` is the length of the prompt.
    """

    round: int
    commits: Sequence[Commit]


@dataclass(frozen=True, slots=True)
class ProposalRow:
    """One row of a `ProposalRequest`: a sequence of the batch that needs a draft tree.

    The row contains the sequence's current fence, its root token, and the shape of the tree.

    With `must_wait` (speculation mode ON), the sequence may skip rounds until its tree arrives. The drafter
    then decides how long the sequence waits. Without `must_wait`, the sequence waits at most until the
    deadline of the `ProposalRequest`.
    """

    fence: Fence
    root_token: int
    shape: DraftShape
    must_wait: bool = False


@dataclass(frozen=True, slots=True)
class ProposalRequest:
    """The request for the draft trees of one round. Each row stands for one sequence.

    The engine waits at most `deadline_s` seconds for the trees of rows without `must_wait`. If `deadline_s`
    is None, the engine waits for the trees of all rows.

    If `has_other_rows` is True, the round also has rows that need no tree. The engine can then run the round
    without the rows of this request.
    """

    round: int
    rows: Sequence[ProposalRow]
    deadline_s: float | None
    has_other_rows: bool = False


AWAITED = "awaited"
"""Fallback reason of a row whose tree may still arrive. The engine leaves the row out of this round and
requests the tree again in the next round, with the same `ProposalRow`."""


@dataclass(frozen=True, slots=True)
class DraftRoute:
    """How a target reaches its drafter.

    Attributes:
        transport: ``none``, ``inproc``, ``ipc`` or ``grpc``.
        features: Names of the protocol features that both sides use. Empty without a connection.
        uptime_s: Seconds since the drafter's process began to load. None without a connection, or if the
            drafter has no process of its own.
        connections_lost: How often the connection to the drafter was lost.
    """

    transport: str = "none"
    features: tuple[str, ...] = ()
    uptime_s: float | None = None
    connections_lost: int = 0


class Drafter(Protocol):
    """Interface that proposes draft trees.

    An engine step uses only this interface for speculation.

    A failure of the draft never makes a method raise an error. After a failure, `propose` returns trees of
    one node (the root), and `fallback_reason` returns the cause. All methods except `state`, `describe`,
    `route` and `refusal` are called from the engine thread only.

    Attributes:
        slots: Interface to the slots of a drafter in another process, if rounds are exchanged with the
            target's device. None for all other drafters.
    """

    slots: ExchangedSlots | None = None

    @property
    def on_device(self) -> DeviceDrafter | None:
        """This drafter, if it drafts on the target's device. None if its trees come from elsewhere."""
        return None

    def route(self) -> DraftRoute:
        """Return how the target reaches this drafter. By default, there is no transport."""
        return DraftRoute()

    def describe(self) -> tuple[str, str]:
        """Return the algorithm and the model id. By default, they are empty."""
        return "", ""

    def refusal(self) -> OutriderError | None:
        """Return why draft and target do not match. None if they match or the draft has not answered."""
        return None

    def feature_spec(self) -> FeatureSpec | None:
        """Return the features that the drafter needs, or None if no draft service has connected yet.

        The result changes if a draft service with another model connects.
        """
        ...

    def state(self) -> DrafterState:
        """Return the current state. Must be cheap, because every step calls it."""
        ...

    @property
    def backing_off(self) -> bool:
        """True while no request is sent to a connected draft, because it did not answer the last ones."""
        return False

    def open(self, sequences: Sequence[SequenceOpen]) -> None:
        """Start following sequences, or open sequences again with a higher epoch."""
        ...

    def features(self, session_id: int, base: int, rows: torch.Tensor) -> None:
        """Send feature rows ``[n, feature_size]`` of positions ``[base, base + n)``.

        These rows belong to a prompt or to a reopened sequence.
        """
        ...

    def absorb(self, session_ids: Sequence[int]) -> None:
        """Start to process the received feature rows of sequences, except the last row of each sequence.

        The work is enqueued, and the call does not wait for the work. The call saves time later, but does not
        change the drafted trees. Afterwards, the engine sends more feature rows of these sequences, or a
        commit with the first token after a prompt.

        By default, this method does nothing, because a drafter in another process starts by itself.
        """
        return

    def commit(self, result: Commits) -> None:
        """Send the tokens that a round chose. Commits are cumulative. A repeated commit has no effect."""
        ...

    def announce(self, request: ProposalRequest) -> None:
        """Announce the next `propose`, so that the draft works while the engine prefills and sends tokens.

        Does not wait.
        """
        ...

    def propose(self, request: ProposalRequest) -> DraftBatch:
        """Return one tree per row, on the target's device.

        Waits as long as `ProposalRow` and `ProposalRequest` allow. A preceding call of `announce` is
        optional. If the fallback reason of a row is `AWAITED`, the tree of this row may still arrive after
        the call.
        """
        ...

    def saved(self, seconds: float) -> None:
        """Report how much time draft trees have saved. Waits for later trees may use up this time.

        By default, this method does nothing, because only a drafter in another process can be late.

        Args:
            seconds: The additional time that plain rounds would have taken for the same tokens.
        """
        return

    def wants_reopen(self) -> Sequence[int]:
        """Return the ids of the sessions that the draft service has lost, and clear this list of ids.

        A draft loses a session by a restart, an eviction or a fence mismatch.

        Open each of these sessions again with epoch + 1. Then send the session's features from position
        `have_len`, or from position 0 if the draft reported no `have_len`.
        """
        ...

    def fallback_reason(self, session_id: int) -> str:
        """Return why the last proposal for this sequence had no draft node, or an empty string."""
        ...

    def close(self, session_ids: Sequence[int]) -> None:
        """Stop following sequences. The draft then frees their state."""
        ...

    def shutdown(self) -> None:
        """Close the connection to the draft and join the drafter's threads."""
        ...
