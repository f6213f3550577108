"""Requests and engines that `hypothesis` draws for mixtures of everything at once."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TypeVar

from hypothesis import strategies as st

from outrider.shared.base.generation import SamplingParams, SpeculationMode
from outrider.shared.base.logit_rules import NO_LOGPROBS, LogitRules, LogprobParams
from outrider.shared.base.token_states import NO_STATES, StateParams
from support.grammars.toy_grammar import ToyGrammar

T = TypeVar("T")
VOCAB = 64
MOST_TOKENS = 30
MOST_NODES = 21
PROMPTS = tuple(
    tuple(random.Random(length).randrange(VOCAB) for _ in range(length)) for length in (1, 2, 7, 17, 40)
)
LONGEST = 96
"""Slots that the longest request needs: its prompt, its output, and the nodes of a tree."""
SHAPES = ((1, 1, 2), (5, 1, 6), (3, 2, 7), (5, 4, 21), (2, 5, 11))
SAMPLINGS = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0, seed=11),
    SamplingParams(temperature=1.0, seed=11, choice_index=3),
    SamplingParams(temperature=0.7, top_k=5, seed=(1 << 64) - 3),
    SamplingParams(temperature=1.0, top_p=0.8, seed=5),
    SamplingParams(temperature=1.3, min_p=0.1, seed=6),
    SamplingParams(temperature=0.9, top_k=20, top_p=0.9, min_p=0.02, seed=7),
    SamplingParams(temperature=0.0, rules=LogitRules(1.2, 0.7, 1.3)),
    SamplingParams(
        temperature=0.8,
        top_p=0.95,
        seed=8,
        rules=LogitRules(-0.5, 0.4, logit_bias=((3, 4.0), (7, -100.0)), bad_words=((3, 3), (5,), (3, 9, 3))),
    ),
    SamplingParams(
        temperature=1.0, seed=9, rules=LogitRules(0.0, 1.5, 0.8, allowed_token_ids=tuple(range(0, 64, 3)))
    ),
)
LOGPROBS = (LogprobParams(top=0), LogprobParams(top=2, prompt_top=1, token_ids=(9, 0, 9)))
GRAMMARS = (ToyGrammar(VOCAB, (5, 9), 8), ToyGrammar(VOCAB, (5, 9), 13))


@dataclass(frozen=True)
class Asked:
    """One request. Steps count from the first step of the engine, or from the step at which it joins.

    Attributes:
        prompt: Index in `PROMPTS`.
        stop_at: Index of the output token that becomes a stop token. None for no stop token.
        joins: Step at which the request is submitted.
        cancels: Step at which the client cancels, and the number of tokens that are billed.
        pauses: Step at which the client pauses, and for how many steps.
        logprobs: The logprobs that the client wants.
        states: The states of tokens that the client wants.
        form: Seed of the form of the output. None if the output has no form.
    """

    prompt: int
    new_tokens: int
    sampling: SamplingParams
    mode: SpeculationMode
    shape: tuple[int, int, int]
    trace: bool
    priority: int
    stop_at: int | None
    joins: int
    cancels: tuple[int, int | None] | None
    pauses: tuple[int, int] | None
    logprobs: LogprobParams = NO_LOGPROBS
    states: StateParams = NO_STATES
    form: int | None = None

    @property
    def grammar(self) -> ToyGrammar | None:
        """The form of the output. None if rules might forbid all tokens that the form allows."""
        if self.form is None or not self.sampling.rules.neutral:
            return None
        return GRAMMARS[self.form]


@dataclass(frozen=True)
class Machine:
    """Limits of the engine, and a drafter with its failures.

    Attributes:
        spare_slots: Number of slots of the pool beyond those of the longest request.
        prefill_budget: Largest number of prompt tokens in a step while others decode.
        prefill_sizes: Numbers of rows of the recorded passes over prompts.
        refuse_every: Refuse every n-th session that drafts on the device; 0 refuses none.
        losses: Steps at which the drafter loses a session.
        down: Steps from the first to the second, during which the drafter is down.
        changes: Steps at which another draft takes the drafter's place, if trees come through the host.
        seed: Seeds the choices of the controller, and the broken trees of a drafter on the host.
    """

    max_running: int
    page_size: int
    spare_slots: int
    prefill_chunk: int
    prefill_budget: int
    prefill_sizes: tuple[int, ...]
    max_packed_rows: int
    features: bool
    accuracy: float
    refuse_every: int
    losses: tuple[int, ...]
    down: tuple[int, int]
    seed: int
    changes: tuple[int, ...] = ()


def requests() -> st.SearchStrategy[Asked]:
    """Draw a request. Most are long and join early, so that many of them share the rounds."""
    steps = st.integers(0, 40)
    return st.builds(
        Asked,
        prompt=st.integers(0, len(PROMPTS) - 1),
        new_tokens=st.sampled_from([*range(12, MOST_TOKENS + 1), 1, 2, 3, 6, 9]),
        sampling=st.sampled_from(SAMPLINGS),
        mode=st.sampled_from([SpeculationMode.ON, SpeculationMode.AUTO, SpeculationMode.OFF]),
        shape=st.sampled_from(SHAPES),
        trace=st.booleans(),
        priority=st.sampled_from([0, 0, 0, 1]),
        stop_at=rarely(st.integers(0, MOST_TOKENS - 1)),
        joins=st.integers(0, 12),
        cancels=rarely(st.tuples(steps, st.one_of(st.none(), st.integers(0, 9)))),
        pauses=rarely(st.tuples(steps, st.integers(1, 20))),
        logprobs=rarely(st.sampled_from(LOGPROBS)).map(lambda wanted: wanted or NO_LOGPROBS),
        states=rarely(st.just(StateParams(hidden_states=True))).map(lambda wanted: wanted or NO_STATES),
        form=rarely(st.sampled_from(range(len(GRAMMARS)))),
    )


def rarely(values: st.SearchStrategy[T]) -> st.SearchStrategy[T | None]:
    """Draw a value in one of five cases, otherwise None."""
    return st.sampled_from(range(5)).flatmap(lambda case: values if case == 4 else st.none())


def machines() -> st.SearchStrategy[Machine]:
    """Draw an engine and a drafter."""
    steps = st.integers(0, 60)
    return st.builds(
        Machine,
        max_running=st.sampled_from([6, 5, 4, 3, 1]),
        page_size=st.sampled_from([4, 1, 16]),
        spare_slots=st.sampled_from([0, 8, 20, 40, 1000]),
        prefill_chunk=st.sampled_from([3, 16, 512]),
        prefill_budget=st.sampled_from([1, 5, 64]),
        prefill_sizes=st.sampled_from([(), (8,), (4, 16, 64)]),
        max_packed_rows=st.sampled_from([2048, 2048, 2048, 40, 8]),
        features=st.booleans(),
        accuracy=st.sampled_from([0.4, 0.8, 1.0]),
        refuse_every=st.sampled_from([0, 0, 2, 5]),
        losses=st.lists(steps, max_size=2).map(tuple),
        down=st.sampled_from([(0, 0), (0, 0), (0, 0), (4, 20)]),
        changes=st.lists(steps, max_size=1).map(tuple),
        seed=st.integers(0, 1 << 20),
    )
