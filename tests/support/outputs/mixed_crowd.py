"""Clients whose requests differ in everything: mode, shape, sampling, trace, length, and time of arrival.

The clients submit, pause and cancel at random while the test steps the engine.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from unittest import mock

import numpy as np
import torch

from outrider.services.target.model.packed_batch import Entry
from outrider.services.target.model.step_runner import Round, StepRunner
from outrider.shared.base.generation import FinishReason, SamplingParams, SpeculationMode
from outrider.shared.base.logit_rules import NO_LOGPROBS, LogprobParams
from outrider.shared.base.token_states import StateParams
from outrider.shared.nn.decoder import Decoder
from outrider.shared.spec.tree import NO_DRAFT, DraftShape
from support.engine.target_harness import Harness, assert_same_tokens, hidden_of
from support.outputs.traces import check_traces

GREEDY = SamplingParams(temperature=0.0)
SAMPLINGS = (
    GREEDY,
    GREEDY,
    SamplingParams(temperature=1.0, seed=(1 << 64) - 3),
    SamplingParams(temperature=0.7, seed=5, choice_index=2),
    SamplingParams(temperature=0.8, top_k=20, top_p=0.9, min_p=0.02, seed=11),
    SamplingParams(temperature=1.2, top_p=0.8, seed=12),
)
SHAPES = ((5, 1, 6), (3, 1, 4), (1, 4, 4), (3, 2, 7), (5, 4, 16), (5, 8, 33))
MODES = (SpeculationMode.ON, SpeculationMode.ON, SpeculationMode.AUTO, SpeculationMode.OFF)
NAMED = LogprobParams(top=0, token_ids=(3, 0))
LONGEST_PAUSE = 60
"""Longest pause of a client, in rounds."""


@dataclass(frozen=True)
class Client:
    """One request. A client that cancels does so after `cancel_after` rounds.

    A client with `wants_data` wants hidden states, and logprobs of `NAMED` tokens.
    """

    name: str
    prompt: list[int]
    new_tokens: int
    sampling: SamplingParams
    mode: SpeculationMode
    shape: tuple[int, int, int]
    trace: bool
    stop: int | None
    cancel_after: int | None
    wants_data: bool = False

    def expected(self, plain: Sequence[int]) -> list[int]:
        """Return the output, given the output of plain decoding without a stop token."""
        if self.stop in plain:
            return list(plain[: plain.index(self.stop) + 1])
        return list(plain)


def draw_clients(
    rng: random.Random,
    count: int,
    vocab_size: int,
    *,
    prompt_lens: Sequence[int] = (1, 3, 20, 70, 150),
    most_tokens: int = 50,
    shapes: Sequence[tuple[int, int, int]] = SHAPES,
    start: int = 0,
    data_every: int = 0,
) -> list[Client]:
    """Draw requests at random. Their names are numbers from `start` on.

    Every client with a number that is divisible by `data_every` has `wants_data`. None if it is 0.
    """
    return [
        Client(
            name=str(start + number),
            prompt=[rng.randrange(vocab_size) for _ in range(rng.choice(prompt_lens))],
            new_tokens=rng.randint(1, most_tokens),
            sampling=rng.choice(SAMPLINGS),
            mode=rng.choice(MODES),
            shape=rng.choice(shapes),
            trace=rng.random() < 0.25,
            stop=rng.randrange(vocab_size) if rng.random() < 0.3 else None,
            cancel_after=rng.randrange(40) if rng.random() < 0.1 else None,
            wants_data=bool(data_every) and number % data_every == 0,
        )
        for number in range(count)
    ]


@dataclass
class Crowd:
    """Submits, pauses and cancels. Pauses and cancellations are counted in rounds, not in seconds.

    Args:
        harness: The engine.
        rng: Decides what happens when.
        most_live: Largest number of live requests.
        haste: Probability that a client submits before a step.

    Attributes:
        paused: Handle → the round at which its client resumes.
        cancels: Handle → the round at which its client cancels.
    """

    harness: Harness
    rng: random.Random
    most_live: int = 10
    haste: float = 0.3
    paused: dict[int, int] = field(default_factory=dict)
    cancels: dict[int, int] = field(default_factory=dict)
    handles: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        # How long a pause lasts depends on the machine, so no client is too slow here.
        self.harness.engine.limits = replace(self.harness.engine.limits, pause_timeout_s=math.inf)

    def submit(self, client: Client) -> None:
        """Submit a client's request."""
        handle = self.harness.submit(
            client.prompt,
            client.new_tokens,
            request_id=client.name,
            sampling=client.sampling,
            mode=client.mode,
            shape=client.shape,
            trace=client.trace,
            stop=() if client.stop is None else (client.stop,),
            logprobs=NAMED if client.wants_data else NO_LOGPROBS,
            states=StateParams(hidden_states=client.wants_data),
        )
        self.handles = [*self.handles, handle][-self.most_live :]
        if client.cancel_after is not None:
            self.cancels[handle] = self._round + client.cancel_after

    def act(self, next_client: Callable[[], Client | None]) -> None:
        """Do what clients do between two steps.

        Args:
            next_client: Returns the next client that may submit; None if there is none.
        """
        rng, engine, now = self.rng, self.harness.engine, self._round
        for handle in [one for one, until in self.paused.items() if until <= now]:
            self._resume(handle)
        for handle in [one for one, until in self.cancels.items() if until <= now]:
            engine.cancel(handle)
            del self.cancels[handle]
        if engine.num_live < self.most_live and rng.random() < self.haste:
            client = next_client()
            if client is not None:
                self.submit(client)
        if self.handles and rng.random() < 0.02:
            handle = rng.choice(self.handles)
            if handle not in self.paused:
                self.paused[handle] = now + rng.randrange(1, LONGEST_PAUSE)
                engine.pause(handle)
        if not engine.has_work():  # all live requests are paused, so no round would resume them
            for handle in list(self.paused):
                self._resume(handle)

    def run(self, clients: Sequence[Client]) -> None:
        """Run all clients to their end."""
        waiting = list(clients)[::-1]
        while waiting or self.harness.engine.has_work():
            self.act(lambda: waiting.pop() if waiting else None)
            if self.harness.engine.has_work():
                self.harness.step()
        self.settle()

    def settle(self) -> None:
        """Let all clients resume, and run until every request has ended."""
        for handle in list(self.paused):
            self._resume(handle)
        self.handles.clear()
        self.cancels.clear()
        self.harness.run()

    @property
    def _round(self) -> int:
        return self.harness.engine.stats().rounds

    def _resume(self, handle: int) -> None:
        del self.paused[handle]
        self.harness.engine.resume(handle)


@dataclass
class Mixtures:
    """What the launched rounds had in common.

    Attributes:
        rounds: Number of rounds.
        mixed: Number of rounds with at least two tree shapes, or with a tree beside a plain row.
        meetings: Number of rounds in which rows ask for different shapes, or some for a tree and others for
            none. Rows in mode `auto` ask for nothing, because the controller may choose either.
        mixed_meetings: Number of these rounds that are mixed.
    """

    rounds: int = 0
    mixed: int = 0
    meetings: int = 0
    mixed_meetings: int = 0


@contextmanager
def watched_rounds() -> Iterator[Mixtures]:
    """Count the mixed rounds that are launched in this block."""
    found, launch = Mixtures(), StepRunner.launch

    def watching(self: StepRunner, entries: Sequence[Entry], *rest: object, **options: object) -> Round:
        found.rounds += 1
        mixed = len({entry.shape for entry in entries}) > 1
        meeting = len({asked_shape(entry) for entry in entries if not is_auto(entry)}) > 1
        found.mixed += mixed
        found.meetings += meeting
        found.mixed_meetings += meeting and mixed
        return launch(self, entries, *rest, **options)  # type: ignore[arg-type]

    with mock.patch.object(StepRunner, "launch", watching):
        yield found


def is_auto(entry: Entry) -> bool:
    """Return True for an entry in mode `auto`."""
    return entry.sequence.controller_state is not None


def asked_shape(entry: Entry) -> DraftShape:
    """Return the shape that the client of an entry asked for; `NO_DRAFT` in mode `off`."""
    sequence = entry.sequence
    return sequence.request.speculation.shape.bounded() if sequence.wants_drafts else NO_DRAFT


def check_outputs(
    decoder: Decoder, harness: Harness, clients: Sequence[Client], plain: dict[str, list[int]]
) -> None:
    """Assert that each client got its plain output, or the beginning of it if the client has cancelled.

    Args:
        decoder: The target.
        harness: The engine that has served the clients.
        clients: The clients.
        plain: The output of plain decoding for each client alone, without a stop token.
    """
    assert not harness.sink.failed
    for client in clients:
        expected = client.expected(plain[client.name])
        found = harness.sink.tokens.get(client.name, [])
        if harness.sink.finished[client.name].reason is FinishReason.CANCELLED:
            expected = expected[: len(found)]
        assert_same_tokens(decoder, client.prompt, expected, found, client.sampling)
        check_client_traces(harness, client, found)
        check_client_data(decoder, harness, client, found)


def check_client_traces(harness: Harness, client: Client, found: Sequence[int]) -> None:
    """Assert that a client gets traces only if it asked for them, and that they explain its output."""
    rounds = harness.sink.rounds.get(client.name, [])
    if client.trace:
        check_traces(rounds, [*client.prompt, *found], len(client.prompt))
    else:
        assert not rounds


def check_client_data(decoder: Decoder, harness: Harness, client: Client, found: Sequence[int]) -> None:
    """Assert that a client gets states and logprobs only if it wants them, and those of one pass."""
    states, scored = harness.sink.states.get(client.name, []), harness.sink.logprobs.get(client.name, [])
    if not client.wants_data:
        assert not states
        assert not scored
        return
    assert len(scored) == len(found)
    if not states:
        assert harness.sink.finished[client.name].reason is FinishReason.CANCELLED
        return
    hidden = hidden_of(decoder, [*client.prompt, *found])
    assert [one.first for one in states] == [0, *[one.stop for one in states[:-1]]]
    rows = np.frombuffer(b"".join(one.hidden_states for one in states), "<f4")
    stop = states[-1].stop
    np.testing.assert_allclose(rows.reshape(stop, -1), hidden[:stop].cpu(), atol=5e-3, rtol=5e-3)
    if found:
        logprobs = decoder.logits(hidden[len(client.prompt) - 1 : -1]).float().log_softmax(-1)
        requested = torch.tensor([one.requested for one in scored])
        torch.testing.assert_close(requested, logprobs[:, list(NAMED.token_ids)].cpu(), atol=5e-3, rtol=0)
