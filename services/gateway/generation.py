"""Generation: runs checked requests on the target and yields pieces of text, for REST and gRPC."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace

from tokenizers import Tokenizer

from outrider.services.gateway.admission import Slot
from outrider.services.gateway.detokenizer import TextAssembler
from outrider.services.gateway.metrics import GatewayMetrics
from outrider.services.gateway.request import (
    ChoiceEvent,
    Chunk,
    Completion,
    Finished,
    GenerationRequest,
    Started,
    TargetDelta,
    TargetFinish,
    Usage,
)
from outrider.services.gateway.round_tally import RoundTally
from outrider.services.gateway.target_client.movable_stream import MovableStream
from outrider.services.gateway.target_client.pool import ModelTargets
from outrider.services.gateway.trace_text import TraceTexts
from outrider.shared.base.errors import OutriderError
from outrider.shared.base.generation import FinishReason, RoundTrace, SpeculationReport
from outrider.shared.base.logit_rules import TokenLogprob
from outrider.shared.base.token_states import TokenStates

# Seconds to wait for statistics after a stop string. The target normally sends them within two rounds.
FINISH_WAIT_S = 2.0


class Generator:
    """Runs sequences on the target and converts their tokens to text."""

    def __init__(self, client: ModelTargets, tokenizer: Tokenizer | None, metrics: GatewayMetrics) -> None:
        self._client = client
        self._tokenizer = tokenizer
        self._metrics = metrics

    def run(self, requests: Sequence[GenerationRequest], slot: Slot) -> AsyncGenerator[ChoiceEvent, None]:
        """Return a generator that runs all sequences of a request concurrently and yields their events.

        The events of each sequence are in order. Closing the generator cancels the running sequences.
        If one sequence fails, the whole request fails.

        Raises:
            OutriderError: If the target reports an error, or the deadline passes.
        """
        sequences = [self._sequence(index, request, slot) for index, request in enumerate(requests)]
        return sequences[0] if len(sequences) == 1 else _merge(sequences)

    async def _sequence(
        self, index: int, request: GenerationRequest, slot: Slot
    ) -> AsyncGenerator[ChoiceEvent, None]:
        loop = asyncio.get_running_loop()
        model = self._client.name
        metrics = self._metrics.of_model(model)
        submitted = last = loop.time()
        started = False
        assembler = TextAssembler(self._tokenizer, request.stop, self._silent_tokens(request))
        texts = self._trace_texts(request)
        stream = self._client.submit(request)
        scores: deque[TokenLogprob] = deque()
        counted = 0  # tokens in the metric; they count as they arrive, because a sequence may break off
        drafts: list[tuple[int, int]] = []
        delivered = _Delivered(request.streams)
        cached_tokens = 0
        try:
            while True:
                event = await stream.next()
                now = loop.time()
                # 1. The first event of a sequence, of any kind, ends its wait in the target's queue.
                if not started:
                    started = True
                    slot.started(index)
                    self._metrics.recent.began()
                    metrics.time_to_first_token.observe(now - submitted)
                    prompt = request.prompt_ids
                    yield ChoiceEvent(index, Started(len(prompt), request.sampling.seed, prompt))
                elif isinstance(event, TargetDelta) and event.token_ids:
                    metrics.inter_token_latency.observe((now - last) / len(event.token_ids))
                last = now
                if isinstance(event, TargetDelta):
                    self._metrics.recent.add_tokens(len(event.token_ids))
                # 2. The target ended the sequence: release the remaining text.
                if isinstance(event, TargetFinish):
                    if (rest := assembler.finish()).token_ids:
                        yield ChoiceEvent(index, _scored(rest, scores))
                    finished = _finished(
                        request, delivered.complete(event), assembler, loop.time() - submitted
                    )
                    self._metrics.finished(model, finished, event.queue_s, counted)
                    yield ChoiceEvent(index, finished)
                    return
                # 3. Decode the new tokens, round by round, up to a stop string.
                if event.prompt_logprobs:
                    prompt, found = request.prompt_ids, event.prompt_logprobs
                    yield ChoiceEvent(index, Chunk("", (), prompt_logprobs=found, prompt_ids=prompt))
                if request.prompt_only:
                    if event.states is not None:
                        yield ChoiceEvent(index, Chunk("", (), states=event.states))
                    continue
                if event.logprobs:
                    scores.extend(event.logprobs)
                if not counted:
                    cached_tokens = event.cached_tokens
                delivered.add(event)
                if event.drafts is not None:
                    drafts.append(event.drafts)
                for token_ids, rounds in _by_round(event):
                    if texts is not None:
                        rounds = _with_texts(texts, token_ids, rounds)
                    piece = assembler.push(token_ids)
                    metrics.generation_tokens.inc(assembler.num_tokens - counted)
                    counted = assembler.num_tokens
                    if piece.text or piece.token_ids or rounds:
                        piece.rounds, piece.cached_tokens = rounds, cached_tokens
                        if drafts:
                            piece.drafts, drafts = drafts, []
                        yield ChoiceEvent(index, _scored(piece, scores))
                    if assembler.matched_stop is not None:
                        break
                if (states := _of_text(event.states, request, assembler)) is not None:
                    yield ChoiceEvent(index, Chunk("", (), states=states))
                # 4. A stop string matched. Cancel the sequence on the target, but wait for its statistics.
                if assembler.matched_stop is not None:
                    stream.cancel(keep_tokens=assembler.num_tokens)
                    end = delivered.complete(await _last_word(stream, request))
                    finished = _finished(request, end, assembler, loop.time() - submitted)
                    self._metrics.finished(model, finished, end.queue_s, counted)
                    yield ChoiceEvent(index, finished)
                    return
        finally:
            if started:
                self._metrics.recent.ended()
            slot.started(index)
            stream.close()

    def _trace_texts(self, request: GenerationRequest) -> TraceTexts | None:
        if self._tokenizer is None or not request.speculation.trace:
            return None
        return TraceTexts(self._tokenizer, request.prompt_ids, request.stop, self._silent_tokens(request))

    def _silent_tokens(self, request: GenerationRequest) -> frozenset[int]:
        """Return the tokens that end the sequence and are not part of its text."""
        stop = request.stop
        eos = frozenset() if stop.ignore_eos else self._client.info.eos_token_ids
        # As in vLLM and SGLang, the client may ask for the stop token that it has named.
        return eos - stop.token_ids if stop.include_stop_string else eos | stop.token_ids


@dataclass(slots=True)
class _Delivered:
    """Counts the rounds of a sequence as their tokens arrive, over all targets that it has run on.

    `by_round` is false if a message of the target may contain several rounds. No stop string can then end the
    text, so the target's own statistics count the delivered rounds.
    """

    by_round: bool
    rounds: RoundTally = field(default_factory=RoundTally)
    parts: int = 0

    def add(self, delta: TargetDelta) -> None:
        """Count the round of a delta. A delta of a prefill has no round."""
        self.parts += bool(delta.token_ids)
        if delta.drafts is not None:
            self.rounds.add([delta.drafts])

    def complete(self, end: TargetFinish) -> TargetFinish:
        """Return the end of the sequence with the statistics of the delivered rounds."""
        # The first part is that of the prefill. If later parts have no rounds, the target does not report
        # the drafts of each round, so its own statistics must do.
        if not self.by_round or (self.parts > 1 and not self.rounds.histogram):
            return end
        return replace(end, speculation=self.rounds.report(end.speculation))


async def collect(events: AsyncIterator[ChoiceEvent], sequences: int) -> list[Completion]:
    """Consume all events and return the finished sequences in order."""
    chunks: list[list[Chunk]] = [[] for _ in range(sequences)]
    starts = [Started(0, 0)] * sequences
    ends: dict[int, Finished] = {}
    async for one in events:
        match one.event:
            case Started() as start:
                starts[one.index] = start
            case Chunk() as chunk:
                chunks[one.index].append(chunk)
            case Finished() as end:
                ends[one.index] = end
    return [
        Completion(ends[index], starts[index].seed, chunks[index], starts[index].prompt_ids)
        for index in range(sequences)
    ]


async def _merge(sequences: Sequence[AsyncGenerator[ChoiceEvent, None]]) -> AsyncGenerator[ChoiceEvent, None]:
    # A queue of one event preserves back-pressure: if the reader stops, the target's streams fill up and
    # pause.
    queue: asyncio.Queue[ChoiceEvent | Exception | None] = asyncio.Queue(maxsize=1)

    async def pump(sequence: AsyncGenerator[ChoiceEvent, None]) -> None:
        async with aclosing(sequence):
            try:
                async for event in sequence:
                    await queue.put(event)
                await queue.put(None)
            except OutriderError as error:
                await queue.put(error)

    tasks = [asyncio.create_task(pump(sequence)) for sequence in sequences]
    running = len(tasks)
    try:
        while running:
            event = await queue.get()
            if isinstance(event, Exception):
                raise event
            if event is None:
                running -= 1
            else:
                yield event
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _last_word(stream: MovableStream, request: GenerationRequest) -> TargetFinish:
    """Return the target's final report after a cancel, or an empty report if none arrives in time."""
    try:
        async with asyncio.timeout(FINISH_WAIT_S):
            while not isinstance(event := await stream.next(), TargetFinish):
                pass
            return event
    except (TimeoutError, OutriderError):
        return TargetFinish(FinishReason.STOP, None, Usage(len(request.prompt_ids), 0), SpeculationReport())


def _finished(
    request: GenerationRequest, end: TargetFinish, assembler: TextAssembler, e2e_s: float
) -> Finished:
    stop_string = assembler.matched_stop
    # Tokens after a stop string are neither shown nor billed, although the target counts them.
    completion_tokens = end.usage.completion_tokens if stop_string is None else assembler.num_tokens
    if request.prompt_only:
        completion_tokens = 0
    usage = Usage(len(request.prompt_ids), completion_tokens, end.usage.cached_tokens)
    if request.prompt_only:
        return Finished(FinishReason.LENGTH, None, usage, end.speculation, e2e_s)
    if stop_string is None:
        return Finished(end.reason, end.matched_token, usage, end.speculation, e2e_s)
    return Finished(FinishReason.STOP, stop_string, usage, end.speculation, e2e_s)


def _of_text(
    states: TokenStates | None, request: GenerationRequest, assembler: TextAssembler
) -> TokenStates | None:
    """Return the states without those of tokens after a stop string."""
    if states is None or assembler.matched_stop is None:
        return states
    return states.between(states.first, len(request.prompt_ids) + assembler.num_tokens - 1)


def _scored(chunk: Chunk, scores: deque[TokenLogprob]) -> Chunk:
    """Give a new chunk the logprobs of its tokens, taken from the front of `scores`, and return it."""
    if scores:
        chunk.logprobs = [scores.popleft() for _ in chunk.token_ids if scores]
    return chunk


def _by_round(delta: TargetDelta) -> Iterable[tuple[Sequence[int], Sequence[RoundTrace]]]:
    """Split a delta into its traced rounds. Tokens of the prefill come first, in a part without a round."""
    return _traced_parts(delta) if delta.rounds else ((delta.token_ids, ()),)


def _traced_parts(delta: TargetDelta) -> Iterator[tuple[Sequence[int], Sequence[RoundTrace]]]:
    at = max(0, len(delta.token_ids) - sum(len(one.emitted) for one in delta.rounds))
    if at:
        yield delta.token_ids[:at], ()
    for one in delta.rounds[:-1]:
        yield delta.token_ids[at : at + len(one.emitted)], (one,)
        at += len(one.emitted)
    yield delta.token_ids[at:], (delta.rounds[-1],)


def _with_texts(
    texts: TraceTexts, token_ids: Sequence[int], rounds: Sequence[RoundTrace]
) -> tuple[RoundTrace, ...]:
    """Return the rounds of a part of a delta, with the texts of their tokens: at most one round."""
    if not rounds:
        texts.emit(token_ids)
    return tuple(texts.describe(one, token_ids) for one in rounds)
