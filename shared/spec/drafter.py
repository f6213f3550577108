"""The interface between the engine and a drafter. The drafter may run on another host or in this process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol, runtime_checkable

import torch

from outrider.shared.spec.fence import Fence
from outrider.shared.spec.tree import DraftBatch, DraftShape


class DrafterState(Enum):
    """Whether a drafter can propose trees now. LATE: only for rows that must wait, because the draft is
    slow."""

    NONE = "none"
    CONNECTING = "connecting"
    WARMING = "warming"
    ON = "on"
    LATE = "late"
    DOWN = "draft_down"


@dataclass(frozen=True, slots=True)
class FeatureSpec:
    """The features that a drafter uses, and how the target turns its hidden states into these features.

    Attributes:
        aux_layer_ids: Layers whose *outputs* are concatenated, in ascending order. Empty if only the final
            hidden state is used.
        final_hidden: True if the feature is the last hidden state after the final norm (EAGLE-1/2, MTP).
        feature_size: Width of the stored feature row. A projector is applied before the row is stored. 0 if
            the drafter uses no features.
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
    """A request to the drafter to follow a sequence from now on.

    The sequence's features are sent with `Drafter.features`. Its first chosen token is sent with
    `Drafter.commit`.

    Attributes:
        fence: The sequence's fence. Its committed_len is the number of `token_ids`.
        token_ids: All tokens committed so far: the prompt and, if the sequence is reopened, the tokens
            emitted after the prompt.
        seed, temperature, choice_index: Parameters of the target's sampling noise, for coupled drafting.
        traceparent: The target's span of the request. Empty if the request is not traced.
    """

    fence: Fence
    token_ids: Sequence[int]
    seed: int
    temperature: float
    choice_index: int = 0
    traceparent: str = ""


@dataclass(frozen=True, slots=True)
class Commit:
    """Tokens that one round chose for one sequence.

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
    """A sequence that requests a tree: its current fence, its root token, and the size of the tree.

    If `must_wait` is True (speculation mode ON), the tree may arrive too late for one round, and the drafter
    decides how long the row waits. Otherwise, the row waits until the request's deadline.
    """

    fence: Fence
    root_token: int
    shape: DraftShape
    must_wait: bool = False


@dataclass(frozen=True, slots=True)
class ProposalRequest:
    """The request for the trees of one round.

    The engine waits at most `deadline_s` for rows without `must_wait`. None means to wait for all rows.

    If `has_other_rows` is True, the round has rows that need no tree. The round could then run without the
    rows of this request.
    """

    round: int
    rows: Sequence[ProposalRow]
    deadline_s: float | None
    has_other_rows: bool = False


AWAITED = "awaited"
"""Fallback reason of a row whose tree may still arrive. The engine leaves the row out of this round and
requests the tree again in the next round, with the same `ProposalRow`."""


class Drafter(Protocol):
    """Proposes trees. The engine step uses speculation through this interface only.

    If the draft fails, methods never raise. `propose` then returns trees of one node (the root), and
    `fallback_reason` returns the cause. All methods are called from the engine thread only.
    """

    @property
    def device_resident(self) -> bool:
        """Whether rounds can stay on the device now; see `shared.spec.resident`.

        Reading it is cheap, because the engine does so on every step.
        """
        ...

    def feature_spec(self) -> FeatureSpec | None:
        """Return the features to capture, or None if they are unknown because no draft has connected yet.

        The result changes if a different draft connects.
        """
        ...

    def state(self) -> DrafterState:
        """Return the current state. Must be cheap, because every step calls it."""
        ...

    def open(self, sequences: Sequence[SequenceOpen]) -> None:
        """Start following sequences, or reopen followed sequences with a higher epoch."""
        ...

    def features(self, session_id: int, base: int, rows: torch.Tensor) -> None:
        """Send feature rows ``[n, feature_size]`` of positions ``[base, base + n)``.

        These rows belong to a prompt or to a reopened sequence.
        """
        ...

    def commit(self, result: Commits) -> None:
        """Send the result of a round. A repeated commit has no effect, and commits are cumulative."""
        ...

    def announce(self, request: ProposalRequest) -> None:
        """Announce the next `propose`, so that the draft works while the engine prefills and sends tokens.

        Does not wait.
        """
        ...

    def propose(self, request: ProposalRequest) -> DraftBatch:
        """Return one tree per row, on the target's device.

        Waits as long as `ProposalRow` and `ProposalRequest` allow. A preceding `announce` is optional. Rows
        with the fallback reason `AWAITED` are still requested when the call returns.
        """
        ...

    def wants_reopen(self) -> Sequence[int]:
        """Return and clear the ids of sessions that the draft has lost (restart, eviction, fence mismatch).

        Open each of these sessions again with epoch + 1. Then send the session's features from position
        `have_len` if the draft reported one, otherwise from position 0.
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


@runtime_checkable
class EagerDrafter(Protocol):
    """A drafter that runs on the engine's thread and processes prompts only when `absorb` is called.

    Other drafters process prompts on their own.
    """

    def absorb(self, session_ids: Sequence[int]) -> None:
        """Enqueue the work on all received rows of these sequences, except on each sequence's last row.

        Does not wait.

        Has no effect on the drafted trees. Afterwards the engine sends either a commit for these sequences
        (the first token after a prompt) or more rows.
        """
        ...


@runtime_checkable
class Described(Protocol):
    """A drafter that reports its algorithm and model."""

    def describe(self) -> tuple[str, str]:
        """Return the algorithm and the model id."""
        ...
