"""The seam between the engine and whatever proposes trees: remote, same host, in process, or nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol, runtime_checkable

import torch

from outrider.shared.spec.fence import Fence
from outrider.shared.spec.tree import DraftBatch, DraftShape


class DrafterState(Enum):
    """What a drafter can do now."""

    NONE = "none"
    CONNECTING = "connecting"
    WARMING = "warming"
    ON = "on"
    DOWN = "draft_down"


@dataclass(frozen=True, slots=True)
class FeatureSpec:
    """What the target must capture for a drafter and how it is turned into the stored feature row.

    Attributes:
        aux_layer_ids: Layers whose *outputs* are concatenated, ascending; empty when only the final hidden state is wanted.
        final_hidden: Whether the feature is the last hidden state after the final norm (EAGLE-1/2, MTP).
        feature_size: Width of the stored row, after the projector where there is one; 0 when the drafter wants no features.
        projector: Tensors that the target applies (``fc.weight`` ``[feature_size, n_aux * hidden]``, optional ``fc.bias``,
            ``fc_norm.N.weight``, ``input_norm.weight``); empty when features travel raw.
        norm_eps: Epsilon of the projector's norms.
        fingerprint: Identifies the projector; stored features are valid for this value only.
    """

    aux_layer_ids: tuple[int, ...] = ()
    final_hidden: bool = False
    feature_size: int = 0
    projector: Mapping[str, torch.Tensor] = field(default_factory=dict)
    norm_eps: float = 1e-5
    fingerprint: str = ""


@dataclass(frozen=True, slots=True)
class SequenceOpen:
    """A sequence that the drafter shall follow from now on; features follow by `features`, the first chosen token by `commit`.

    Attributes:
        fence: committed_len is the number of `token_ids`.
        token_ids: All tokens committed so far: the prompt, and what was emitted when this is a reopening.
        seed, temperature, choice_index: The noise that the target samples with, for coupled drafting.
    """

    fence: Fence
    token_ids: Sequence[int]
    seed: int
    temperature: float
    choice_index: int = 0


@dataclass(frozen=True, slots=True)
class Commit:
    """What one round chose for one sequence.

    Attributes:
        fence: The state *after* the round.
        base_len: committed_len before the round.
        token_ids: The tokens at ``[base_len, fence.committed_len)``: accepted drafts, then the bonus token.
        features: Rows of positions ``[base_len - 1, fence.committed_len - 1)``, ``[n, feature_size]``, on the target's device; None
            when the drafter wants none.
    """

    fence: Fence
    base_len: int
    token_ids: Sequence[int]
    features: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class Commits:
    """All commits of one engine step. The first token after prefill is a commit with ``base_len`` = prompt length."""

    round: int
    commits: Sequence[Commit]


@dataclass(frozen=True, slots=True)
class ProposalRow:
    """One sequence that wants a tree: its fence now, its root token, and how large a tree.

    `must_wait` rows (mode on) are waited for until the drafter counts as faulty, the others until the request's deadline.
    """

    fence: Fence
    root_token: int
    shape: DraftShape
    must_wait: bool = False


@dataclass(frozen=True, slots=True)
class ProposalRequest:
    """One round's request. `deadline_s` is how long the engine waits for rows without `must_wait`; None waits for all of them."""

    round: int
    rows: Sequence[ProposalRow]
    deadline_s: float | None


class Drafter(Protocol):
    """Proposes trees; everything that the engine step knows of speculation. Never raises for a fault of the draft: it answers with
    trees of one node (the root) and says why in `fallback_reason`. All methods are called from the engine thread only."""

    @property
    def device_resident(self) -> bool:
        """Whether rounds can stay on the device now, see `shared.spec.device`; cheap, asked every step."""
        ...

    def feature_spec(self) -> FeatureSpec | None:
        """Return what to capture, or None while unknown (not connected yet). May change when a different draft connects."""
        ...

    def state(self) -> DrafterState:
        """Return what the drafter can do now; cheap, called every step."""
        ...

    def open(self, sequences: Sequence[SequenceOpen]) -> None:
        """Start following sequences, or restart them at a higher epoch."""
        ...

    def features(self, session_id: int, base: int, rows: torch.Tensor) -> None:
        """Hand over feature rows of positions ``[base, base + n)`` of a prompt or a resync: ``[n, feature_size]``."""
        ...

    def commit(self, result: Commits) -> None:
        """Hand over what a round chose. Idempotent and cumulative."""
        ...

    def announce(self, request: ProposalRequest) -> None:
        """Say what `propose` will ask for next, so that the draft works while the engine prefills and delivers. Does not wait."""
        ...

    def propose(self, request: ProposalRequest) -> DraftBatch:
        """Return one tree per row, on the target's device; waits at most the deadline. Needs no `announce` before it."""
        ...

    def wants_reopen(self) -> Sequence[int]:
        """Return and clear the session ids that the draft lost (restart, eviction, fence mismatch) and that must be opened again
        with epoch + 1, each followed by its features from position 0 (or what `have_len` says)."""
        ...

    def fallback_reason(self, session_id: int) -> str:
        """Return why the last proposal for this sequence held no draft node, or an empty string."""
        ...

    def close(self, session_ids: Sequence[int]) -> None:
        """Stop following sequences; the draft frees their state."""
        ...

    def shutdown(self) -> None:
        """Close the connection, join threads."""
        ...


@runtime_checkable
class EagerDrafter(Protocol):
    """A drafter on the engine's thread that takes in prompts only when it is told to; others do so by themselves."""

    def absorb(self, session_ids: Sequence[int]) -> None:
        """Enqueue what can be done about the rows of these sequences that have come, but for the last, and wait for nothing.

        Of no effect on what is drafted. Their next commit follows: the first token of a prompt, or there are more rows to come.
        """
        ...
