"""Cuts a round's tokens at stop tokens and the length limit; summarizes rounds for trace and controller."""

from __future__ import annotations

from collections.abc import Collection
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from outrider.services.target.model.outcome import Outcome
from outrider.services.target.policy.controller import ExecutedRow, ExecutedStep
from outrider.services.target.scheduling.sequence import Sequence
from outrider.services.target.step_times import StepTimes
from outrider.shared.base.generation import FinishReason, RoundTrace, TraceNode
from outrider.shared.spec.tree import DraftBatch


@dataclass(slots=True)
class RoundCounter:
    """Counts decode steps."""

    value: int = 0


@dataclass(frozen=True, slots=True)
class Advance:
    """Progress of one sequence in one round.

    Attributes:
        kept: The tokens that are kept and emitted.
        num_cut: Number of tokens that were dropped after a stop token or the length limit.
        finish: The reason why the sequence ends with these tokens. None if the sequence continues.
        matched_token: The stop token that ended the sequence. None if no stop token did.
    """

    kept: list[int]
    num_cut: int
    finish: FinishReason | None
    matched_token: int | None


def advance(sequence: Sequence, emitted: list[int]) -> Advance:
    """Append chosen tokens to a sequence, up to the first stop token or the sequence's length limit.

    Lengths, usage and noise positions do not include dropped tokens.
    """
    kept, finish, matched = emitted, None, None
    stop_ids, remaining = sequence.stop_ids, sequence.remaining
    for index, token in enumerate(emitted):
        if token in stop_ids:
            kept, finish, matched = emitted[: index + 1], FinishReason.STOP, token
            break
        if index + 1 == remaining:
            kept, finish = emitted[: index + 1], FinishReason.LENGTH
            break
    sequence.tokens.extend(kept)
    return Advance(kept, len(emitted) - len(kept), finish, matched)


def round_trace(
    drafts: DraftBatch,
    index: int,
    base_len: int,
    round_number: int,
    outcome: Outcome,
    emitted: list[int],
    times: StepTimes,
) -> RoundTrace:
    """Describe one row of a verified batch for the client. Copies the row's tree to the host."""
    num_nodes = outcome.num_nodes
    tokens, parents, depths = (
        field[index, :num_nodes].tolist() for field in (drafts.tokens, drafts.parents, drafts.depths)
    )
    logprobs = [0.0] * num_nodes if drafts.logprobs is None else drafts.logprobs[index, :num_nodes].tolist()
    return RoundTrace(
        round=round_number,
        base_len=base_len,
        nodes=[TraceNode(*node) for node in zip(tokens, parents, depths, logprobs, strict=True)],
        accepted=outcome.accepted,
        emitted=emitted,
        draft_ms=drafts.draft_ms if num_nodes > 1 else 0.0,
        verify_ms=times.verify_s * 1e3,
    )


def executed_step(
    decodes: Seq[Sequence],
    outcomes: Seq[Outcome],
    drafts: DraftBatch,
    depth: int,
    chains: Collection[int],
    times: StepTimes,
) -> ExecutedStep:
    """Summarize a step for the controller.

    Args:
        decodes: The batch.
        outcomes: One outcome per sequence.
        drafts: The verified trees.
        depth: Depth of the deepest requested tree. 0 if no tree was requested.
        chains: The rows that requested chains.
        times: The timestamps of the step.
    """
    offered = [0] * len(decodes) if depth == 0 else drafts.depths.amax(dim=1).tolist()
    return ExecutedStep(
        rows=[
            ExecutedRow(
                sequence.controller_row,
                outcome.num_nodes,
                depth_offered,
                len(outcome.accepted),
                place in chains,
            )
            for place, (sequence, depth_offered, outcome) in enumerate(
                zip(decodes, offered, outcomes, strict=True)
            )
        ],
        depth=depth,
        wait_s=times.draft_wait_s if depth else None,
        verify_s=times.verify_s,
        overhead_s=times.overhead_s,
    )
