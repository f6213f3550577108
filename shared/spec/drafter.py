"""The interface between the engine and a drafter, whether remote, on the same host, in process, or absent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol, runtime_checkable

import torch

from outrider.shared.spec.fence import Fence
from outrider.shared.spec.tree import DraftBatch, DraftShape


class DrafterState(Enum):
    """Whether a drafter can propose trees now."""

    NONE = "none"
    CONNECTING = "connecting"
    WARMING = "warming"
    ON = "on"
    DOWN = "draft_down"


@dataclass(frozen=True, slots=True)
class FeatureSpec:
    """Features (hidden states of the target) that a drafter uses, and how they become stored feature rows.

    Attributes:
        aux_layer_ids: Layers whose *outputs* are concatenated, ascending. Empty if only the final hidden
            state is used.
        final_hidden: Whether the feature is the last hidden state after the final norm (EAGLE-1/2, MTP).
        feature_size: Width of the stored row, after the projector if there is one. 0 if the drafter uses no
            features.
        projector: Tensors that the target applies: ``fc.weight`` ``[feature_size, n_aux * hidden]``,
            optionally ``fc.bias``, ``fc_norm.N.weight`` and ``input_norm.weight``. Empty if features are sent
            raw.
        norm_eps: Epsilon of the projector's norms.
        fingerprint: Identifies the projector. Stored features are valid only for this value.
    """

    aux_layer_ids: tuple[int, ...] = ()
    final_hidden: bool = False
    feature_size: int = 0
    projector: Mapping[str, torch.Tensor] = field(default_factory=dict)
    norm_eps: float = 1e-5
    fingerprint: str = ""


@dataclass(frozen=True, slots=True)
class SequenceOpen:
    """A sequence that the drafter follows from now on.

    Its features are sent with `Drafter.features`, its first chosen token with `Drafter.commit`.

    Attributes:
        fence: Its committed_len is the number of `token_ids`.
        token_ids: All tokens committed so far: the prompt and, when reopening, the tokens emitted since.
        seed, temperature, choice_index: Parameters of the target's sampling noise, for coupled drafting.
    """

    fence: Fence
    token_ids: Sequence[int]
    seed: int
    temperature: float
    choice_index: int = 0


@dataclass(frozen=True, slots=True)
class Commit:
    """Tokens that one round chose for one sequence.

    Attributes:
        fence: The state *after* the round.
        base_len: committed_len before the round.
        token_ids: The tokens at ``[base_len, fence.committed_len)``: accepted drafts, then the bonus token.
        features: Rows of positions ``[base_len - 1, fence.committed_len - 1)``, ``[n, feature_size]``, on the
            target's device. None if the drafter uses no features.
    """

    fence: Fence
    base_len: int
    token_ids: Sequence[int]
    features: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class Commits:
    """All commits of one engine step.

    The first token after prefill is a commit with ``base_len`` = prompt length.
    """

    round: int
    commits: Sequence[Commit]


@dataclass(frozen=True, slots=True)
class ProposalRow:
    """A sequence that requests a tree: its current fence, its root token, and the size of the tree.

    The engine waits for `must_wait` rows (mode on) until the drafter counts as faulty, and for the others
    until the request's deadline.
    """

    fence: Fence
    root_token: int
    shape: DraftShape
    must_wait: bool = False


@dataclass(frozen=True, slots=True)
class ProposalRequest:
    """One round's request.

    The engine waits `deadline_s` for rows without `must_wait`; None means to wait for all rows.
    """

    round: int
    rows: Sequence[ProposalRow]
    deadline_s: float | None


class Drafter(Protocol):
    """Proposes trees. The engine step uses speculation through this interface only.

    Methods never raise for a fault of the draft. They return trees of one node (the root), and
    `fallback_reason` returns the cause. All methods are called from the engine thread only.
    """

    @property
    def device_resident(self) -> bool:
        """Whether rounds can stay on the device now; see `shared.spec.resident`.

        Cheap: read on every step.
        """
        ...

    def feature_spec(self) -> FeatureSpec | None:
        """Return the features to capture, or None if unknown (not connected yet).

        Changes if a different draft connects.
        """
        ...

    def state(self) -> DrafterState:
        """Return the current state. Cheap: called on every step."""
        ...

    def open(self, sequences: Sequence[SequenceOpen]) -> None:
        """Start following sequences, or restart them at a higher epoch."""
        ...

    def features(self, session_id: int, base: int, rows: torch.Tensor) -> None:
        """Send features of a prompt or a resync: ``[n, feature_size]`` at positions ``[base, base + n)``."""
        ...

    def commit(self, result: Commits) -> None:
        """Send the result of a round. Idempotent and cumulative."""
        ...

    def announce(self, request: ProposalRequest) -> None:
        """Announce the next `propose`, so that the draft works while the engine prefills and sends tokens.

        Does not wait.
        """
        ...

    def propose(self, request: ProposalRequest) -> DraftBatch:
        """Return one tree per row, on the target's device.

        Waits as long as `ProposalRow` and `ProposalRequest` allow. A preceding `announce` is optional.
        """
        ...

    def wants_reopen(self) -> Sequence[int]:
        """Return and clear the ids of sessions that the draft lost (restart, eviction, fence mismatch).

        Open each of them again with epoch + 1, then send its features from position 0, or from `have_len` if
        reported.
        """
        ...

    def fallback_reason(self, session_id: int) -> str:
        """Return why the last proposal for this sequence had no draft node, or an empty string."""
        ...

    def close(self, session_ids: Sequence[int]) -> None:
        """Stop following sequences; the draft frees their state."""
        ...

    def shutdown(self) -> None:
        """Close the connection and join the threads."""
        ...


@runtime_checkable
class EagerDrafter(Protocol):
    """A drafter on the engine's thread that processes prompts only when `absorb` is called.

    Other drafters process prompts on their own.
    """

    def absorb(self, session_ids: Sequence[int]) -> None:
        """Enqueue all possible work on the received rows of these sequences, except on the last row of each.

        Does not wait.

        Has no effect on the drafted trees. The next call for these sequences is a commit (the first token of
        a prompt), or more rows follow.
        """
        ...
