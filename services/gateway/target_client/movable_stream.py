"""One sequence on the gateway's pool of targets. If its target is lost, the sequence moves to another target.

The new target receives the prompt and the tokens emitted so far (`resume_ids`). It prefills both and
continues from there. The seed and the noise depend only on token positions, so the move does not change the
tokens. The usage counts the stored prompt tokens that the target of the first token found.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace
from typing import Protocol

from outrider.services.gateway.request import GenerationRequest, TargetDelta, TargetFinish, Usage
from outrider.services.gateway.target_client.member import Member
from outrider.services.gateway.target_client.stream import TargetStream
from outrider.shared.base.errors import DeadlineExceededError, ErrorCode, OutriderError
from outrider.shared.base.generation import FinishReason, SpeculationReport
from outrider.shared.obs.logging import get_logger

TARGET_LOST = "target_lost"
# If a request loses more than this many targets in a row without a new token, it may itself be the cause.
MAX_FRUITLESS_LOSSES = 2
# The final length of an answer is unknown. In the estimate of a target's work, a sequence's new tokens count
# as the larger number at most. While the sequence runs, they count as the smaller number at least.
MOST_NEW_TOKENS, LEAST_NEW_TOKENS = 1024, 64
_log = get_logger("outrider.gateway.target")


class TargetChooser(Protocol):
    """Chooses targets for sequences."""

    def choose(
        self, request: GenerationRequest, model_key: tuple[str, str] | None, left: dict[Member, int]
    ) -> Member | None:
        """Return a ready target for a request, or None.

        Args:
            request: The request, including the tokens that have been emitted for it so far.
            model_key: Key of the model that the target must serve (`Member.model_key`). None allows every
                model.
            left: Targets that the request has left, with their number of connections at that time. Such a
                target is chosen again only after it has reconnected.
        """
        ...

    def patience_s(self) -> float:
        """Return how long a sequence without a target waits for a new target, in seconds."""
        ...

    async def changed(self) -> None:
        """Wait until a target changes its state."""
        ...

    def moved(self, model: str, reason: str) -> None:
        """Count a sequence of a model that has moved."""
        ...

    def forget(self, request_id: str, member: Member | None) -> None:
        """Forget a sequence that has ended. Called exactly once."""
        ...


class MovableStream:
    """The events of one sequence on the pool of targets.

    Read them with `next` until a `TargetFinish`, and always call `close`. At the request's deadline, the
    sequence is cancelled and fails.

    Args:
        request: The request for the sequence.
        placement: Chooses the targets.
        member: The first target.

    Raises:
        UnavailableError: If the first target is not ready.
    """

    def __init__(self, request: GenerationRequest, placement: TargetChooser, member: Member) -> None:
        self.request_id = request.request_id
        self._request = request
        self._placement = placement
        self._model = member.labels["model"]
        self._model_key = member.model_key
        self._emitted: list[int] = []
        self._cached_tokens = 0
        self._prompt_scored = 0
        self._states_len = request.states.start
        self._left: dict[Member, int] = {}
        self._fruitless = 0
        self._progress = 0
        self._cancelled = False
        self._keep_tokens: int | None = None
        self._closed = False
        # Number of the next round in the trace, and the offset that is added to the current target's numbers.
        self._next_round = self._first_round = 0
        self._stop_ids: frozenset[int] = frozenset()
        self._prompt_load = self._new_load = 0
        self._member: Member | None = None
        self._stream: TargetStream | None = None
        self._enter(member, request)
        # One timer for the whole sequence. A timeout around each wait would take longer than the wait itself.
        self._deadline = asyncio.get_running_loop().call_at(request.deadline, self._expire)

    async def next(self) -> TargetDelta | TargetFinish:
        """Wait for the next event of the sequence. If the target is lost, first move to another target.

        Raises:
            DeadlineExceededError: If the request's deadline has passed.
            OutriderError: If a target rejected the sequence, or if the target was lost and no other target
                could continue the sequence.
        """
        while True:
            if self._stream is None:
                return self._ended_alone() or self._end(FinishReason.CANCELLED, None)
            try:
                event = await self._stream.next()
            except OutriderError as error:
                if error.code is not ErrorCode.UNAVAILABLE:
                    raise
                if (end := self._ended_alone()) is not None:
                    return end
                await self._move(error)
                continue
            return self._count(event) if isinstance(event, TargetDelta) else self._with_cached(event)

    def cancel(self, keep_tokens: int | None = None) -> None:
        """Ask the target to stop the sequence. Its `TargetFinish` still arrives.

        Args:
            keep_tokens: Number of tokens to bill. None bills all tokens.
        """
        self._cancelled, self._keep_tokens = True, keep_tokens
        if self._stream is not None:
            self._stream.cancel(keep_tokens)

    def close(self) -> None:
        """Release the stream. Cancel the sequence if it still runs. Repeated calls have no effect."""
        if self._closed:
            return
        self._closed = True
        self._deadline.cancel()
        self._placement.forget(self.request_id, self._leave())

    def _expire(self) -> None:
        """End the sequence at its deadline. Without a target, `_move` ends it."""
        if self._stream is not None:
            if not self._cancelled:
                self._stream.cancel()
            self._stream.deliver(_overdue(), 0)

    def _count(self, delta: TargetDelta) -> TargetDelta:
        """Record the tokens of a delta, and number the rounds of its trace consecutively over all targets."""
        self._prompt_scored += len(delta.prompt_logprobs)
        if delta.states is not None:
            self._states_len = delta.states.stop
        if delta.token_ids:
            if not self._emitted:
                self._cached_tokens = delta.cached_tokens
            self._emitted += delta.token_ids
            self._owe(0, max(self._new_load - len(delta.token_ids), min(self._new_load, LEAST_NEW_TOKENS)))
        if not delta.rounds:
            return delta
        if self._first_round:
            rounds = tuple(replace(one, round=self._first_round + one.round) for one in delta.rounds)
            delta = replace(delta, rounds=rounds)
        self._next_round = delta.rounds[-1].round + 1
        return delta

    async def _move(self, error: OutriderError) -> None:
        """Continue at another target. If the sequence is cancelled while it waits, return without a target.

        Raises:
            DeadlineExceededError: If the request's deadline passes.
            OutriderError: The given `error`, if no other target becomes available in time.
        """
        lost = self._leave()
        assert lost is not None
        self._left[lost] = lost.client.connections
        progress = len(self._emitted) + self._prompt_scored + self._states_len
        if error.reason == TARGET_LOST:
            self._fruitless = self._fruitless + 1 if progress == self._progress else 0
            if self._fruitless > MAX_FRUITLESS_LOSSES:
                raise error
        self._progress = progress
        rest = self._rest()
        clock = asyncio.get_running_loop().time
        began = clock()
        while not self._cancelled:
            member = self._placement.choose(rest, self._model_key, self._left)
            if member is not None:
                self._enter(member, rest)
                self._placement.moved(self._model, error.reason)
                _log.info(
                    "request moved",
                    request=self.request_id,
                    source=lost.address,
                    destination=member.address,
                    reason=error.reason,
                    tokens=len(self._emitted),
                    waited_s=round(clock() - began, 3),
                )
                return
            give_up = began + self._placement.patience_s()
            if clock() >= self._request.deadline:
                raise _overdue()
            if clock() >= give_up:
                raise error
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(min(give_up, self._request.deadline)):
                    await self._placement.changed()

    def _enter(self, member: Member, request: GenerationRequest) -> None:
        self._stream = member.client.submit(request)
        self._member = member
        self._resumed = bool(request.resume_ids)
        self._first_round = self._next_round
        stop = request.stop
        self._stop_ids = (
            stop.token_ids if stop.ignore_eos else stop.token_ids | member.client.info.eos_token_ids
        )
        member.placed += 1
        member.running += 1
        left = request.max_new_tokens - len(request.resume_ids)
        self._owe(len(request.prompt_ids) + len(request.resume_ids), min(left, MOST_NEW_TOKENS))

    def _leave(self) -> Member | None:
        """Release the current target and return it. Return None if there is no current target."""
        member = self._member
        if self._stream is not None and member is not None:
            self._stream.close()
            self._owe(0, 0)
            member.running -= 1
            self._stream = self._member = None
        return member

    def _owe(self, prompt: int, new: int) -> None:
        """Set the numbers of prompt tokens and new tokens that the current target has yet to process."""
        assert self._member is not None
        self._member.load += prompt + new - self._prompt_load - self._new_load
        self._prompt_load, self._new_load = prompt, new

    def _rest(self) -> GenerationRequest:
        """Return the request for the tokens, logprobs and states that have not arrived yet."""
        request, wanted = self._request, self._request.logprobs
        if wanted.prompt_top is not None and self._prompt_scored:
            start = max(1, wanted.prompt_start) + self._prompt_scored
            complete = bool(self._emitted) or start >= len(request.prompt_ids)
            wanted = replace(wanted, prompt_top=None) if complete else replace(wanted, prompt_start=start)
        states = replace(request.states, start=self._states_len)
        return replace(request, logprobs=wanted, states=states, resume_ids=tuple(self._emitted))

    def _ended_alone(self) -> TargetFinish | None:
        """Return the end of a sequence that is complete or cancelled. Return None for any other sequence."""
        if self._cancelled:
            reason = FinishReason.CANCELLED if self._keep_tokens is None else FinishReason.STOP
            return self._end(reason, None)
        if self._emitted and self._emitted[-1] in self._stop_ids:
            return self._end(FinishReason.STOP, self._emitted[-1])
        if len(self._emitted) >= self._request.max_new_tokens:
            return self._end(FinishReason.LENGTH, None)
        return None

    def _end(self, reason: FinishReason, matched: int | None) -> TargetFinish:
        kept = len(self._emitted) if self._keep_tokens is None else self._keep_tokens
        usage = Usage(len(self._request.prompt_ids), kept, self._cached_tokens)
        return TargetFinish(reason, matched, usage, SpeculationReport())

    def _with_cached(self, end: TargetFinish) -> TargetFinish:
        """Return the end of a sequence, without the stored tokens that a later target found.

        A later target also finds tokens that were computed for this request or for others that moved to it.
        """
        if not self._resumed:
            return end
        return replace(end, usage=replace(end.usage, cached_tokens=self._cached_tokens))


def _overdue() -> DeadlineExceededError:
    return DeadlineExceededError("The request's deadline passed before it finished.")
