"""Loads a target and its draft into this process, and answers requests with or without the draft."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch

from outrider.kernels.philox import gumbel_noise
from outrider.kernels.verify.filters import filter_logits
from outrider.services.doctor.pair import Pair
from outrider.services.doctor.probe import PAGE_SIZE, drafting, load_draft, load_pair_target
from outrider.services.target.drafting.no_drafter import NoDrafter
from outrider.services.target.engine.engine import TargetEngine
from outrider.services.target.model.model_runner import ModelRunner
from outrider.services.target.model.token_states import sparse_layers
from outrider.services.target.request import EngineRequest, Event, FailedEvent, TokensEvent
from outrider.services.target.scheduling.limits import EngineLimits, SchedulerLimits
from outrider.services.target.scheduling.scheduler import Scheduler
from outrider.shared.attn.base import build_batch
from outrider.shared.attn.create import create_backend
from outrider.shared.base.generation import SamplingParams
from outrider.shared.base.logit_rules import TokenLogprob
from outrider.shared.base.token_states import TokenStates
from outrider.shared.spec.seeds import signed_seed
from outrider.shared.spec.tree import DraftShape

SEQUENCES = 32
"""Number of sequences that are answered at a time."""


@dataclass
class Answers:
    """The answers of one run of a target, collected from the events of its requests.

    Attributes:
        tokens: Request id → emitted tokens.
        parts: Request id → the same tokens, grouped as they arrived.
        logprobs: Request id → logprobs of these tokens, for requests that ask for logprobs.
        prompt_logprobs: Request id → logprobs of the prompt's tokens, for requests that ask for them.
        states: Request id → states of the tokens, for requests that ask for states.
        failed: Requests that failed.
        accept_length: Average number of tokens per round, over rounds with draft nodes.
        on_finish: Called with the id of each request that has finished.
    """

    tokens: dict[str, list[int]] = field(default_factory=dict)
    logprobs: dict[str, list[TokenLogprob]] = field(default_factory=dict)
    prompt_logprobs: dict[str, list[TokenLogprob]] = field(default_factory=dict)
    states: dict[str, list[TokenStates]] = field(default_factory=dict)
    parts: dict[str, list[Sequence[int]]] = field(default_factory=dict)
    failed: list[FailedEvent] = field(default_factory=list)
    accept_length: float = 1.0
    on_finish: Callable[[str], None] = lambda _: None

    def deliver(self, events: Sequence[Event]) -> None:
        """Collect the tokens, logprobs, states and failures of one step."""
        for event in events:
            if isinstance(event, TokensEvent):
                self.tokens.setdefault(event.request_id, []).extend(event.token_ids)
                self.parts.setdefault(event.request_id, []).append(event.token_ids)
                self.logprobs.setdefault(event.request_id, []).extend(event.logprobs)
                self.prompt_logprobs.setdefault(event.request_id, []).extend(event.prompt_logprobs)
                if event.states is not None:
                    self.states.setdefault(event.request_id, []).append(event.states)
            elif isinstance(event, FailedEvent):
                self.failed.append(event)
            else:
                self.on_finish(event.request_id)


class PairEngine:
    """An engine that runs a target and a draft in this process, without services.

    Args:
        pair: The target and the draft. There must be a drafting method.
        room: Largest number of tokens of a sequence, including the nodes of a draft tree.
        shape: Shape of the largest draft tree.

    Attributes:
        decoder: The loaded target.
        has_experts: True if the target has routed experts that clients may request.
        on_finish: Called with each request that has finished.

    Raises:
        CheckpointError, ConfigurationError: The target or the draft cannot be loaded.
    """

    def __init__(self, pair: Pair, room: int, shape: DraftShape) -> None:
        self.on_finish: Callable[[EngineRequest], None] = lambda _: None
        self.decoder = load_pair_target(pair)
        self.has_experts = bool(sparse_layers(self.decoder))
        self._room = room
        self._draft, self._spec = load_draft(pair, self.decoder, room, shape, SEQUENCES)

    def answer(self, requests: Iterable[EngineRequest], *, speculate: bool) -> Answers:
        """Answer requests, several at a time.

        Args:
            requests: The requests.
            speculate: False runs the target without the draft, even for requests that ask for speculation.

        Raises:
            OutriderError: A request failed.
        """
        decoder, queue = self.decoder, list(requests)
        by_id = {request.request_id: request for request in queue}
        answers = Answers(on_finish=lambda name: self.on_finish(by_id[name]))
        around = (
            drafting(self._draft, self._spec, decoder)
            if speculate
            else nullcontext(NoDrafter(decoder.device))
        )
        with around as drafter:
            pool = decoder.make_pool(SEQUENCES * -(-self._room // PAGE_SIZE), PAGE_SIZE)
            runner = ModelRunner(decoder, pool, create_backend("auto", decoder.device))
            scheduler = Scheduler(
                pool.allocator,
                PAGE_SIZE,
                SchedulerLimits(max_running=SEQUENCES, max_queued=len(queue), prefix_cache=False),
            )
            limits = EngineLimits(
                decoder.config.vocab_size,
                self._room,
                frozenset(decoder.config.eos_token_ids),
                routes=self.has_experts,
            )
            engine = TargetEngine(runner, scheduler, drafter, limits)
            for request in queue:
                engine.submit(request, answers)
            while engine.has_work():
                engine.step()
            answers.accept_length = engine.stats().speculation.accept_length
        if answers.failed:
            raise answers.failed[0].error
        return answers

    def logits(self, tokens: Sequence[int]) -> torch.Tensor:
        """Return the logits ``[vocab] float32`` of the token after `tokens`, from one pass, on the host."""
        decoder = self.decoder
        pool = decoder.make_pool(-(-len(tokens) // PAGE_SIZE), PAGE_SIZE)
        lease = pool.lease(len(tokens))
        assert lease is not None, "the pool has room for these tokens"
        attention = create_backend("auto", decoder.device)
        attention.plan(build_batch(pool, [lease], [0], [len(tokens)]))
        ids = torch.tensor(tokens, device=decoder.device)
        positions = torch.arange(len(tokens), device=decoder.device)
        with torch.inference_mode():
            hidden = decoder.forward(ids, positions, attention, pool).hidden[-1:]
            return decoder.logits(hidden)[0].float().cpu()


def scores_of(logits: torch.Tensor, position: int, sampling: SamplingParams) -> torch.Tensor:
    """Return the scores ``[vocab] float32`` by which sampling chooses among the tokens that the filters keep.

    The largest score wins.

    Args:
        logits: ``[vocab] float32``.
        position: Position of the chosen token in the sequence.
        sampling: The sampling parameters. For greedy sampling, the scores are the logits.
    """
    if sampling.temperature == 0:
        return logits
    seed = signed_seed(sampling.seed)
    choice = torch.tensor([sampling.choice_index], dtype=torch.int32)
    noise = gumbel_noise(torch.tensor([seed]), torch.tensor([position]), choice, logits.shape[0])
    return logits / sampling.temperature + noise[0]


def filtered(logits: torch.Tensor, sampling: SamplingParams) -> torch.Tensor:
    """Return ``[1, vocab]``: the logits after temperature and filters. A filtered token has -inf."""
    return filter_logits(
        logits[None] / sampling.temperature,
        torch.tensor([sampling.top_k], dtype=torch.int32),
        torch.tensor([sampling.top_p]),
        torch.tensor([sampling.min_p]),
    )
