"""The cases of `outrider bench mixed` as data: kinds of requests, pairings, mixes and their goals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

from outrider.bench.load.samplings import GREEDY, SAMPLINGS, Sampling

OFF: Mapping[str, Any] = {"mode": "off"}


class Section(Enum):
    """The parts of the benchmark, in the order in which they run."""

    ODD = "odd"
    AUTO = "auto"
    GAP = "gap"
    TTFT = "ttft"
    SOAK = "soak"
    FORM = "form"
    RULES = "rules"


@dataclass(frozen=True, slots=True)
class RequestKind:
    """The properties of one kind of request, apart from prompt and length.

    Attributes:
        speculation: The `speculation` object of the request.
        sampling: The sampling fields of the request.
        schema: JSON schema that the answer must match, or None.
        logprobs: Number of most likely tokens whose log-probabilities are returned at each position. 0 for
            none.
    """

    speculation: Mapping[str, Any] = field(default_factory=lambda: OFF)
    sampling: Sampling = field(default_factory=lambda: GREEDY)
    schema: Mapping[str, Any] | None = None
    logprobs: int = 0

    @property
    def is_plain(self) -> bool:
        """True if the request is the same on a server that has no `speculation` object."""
        return self.speculation == OFF

    @property
    def drafts(self) -> bool:
        """True if the request may use a draft."""
        return bool(self.speculation["mode"] != "off")

    def as_json(self) -> dict[str, Any]:
        """Return the kind as JSON values."""
        made: dict[str, Any] = {"speculation": dict(self.speculation), "sampling": dict(self.sampling)}
        if self.schema is not None:
            made["schema"] = dict(self.schema)
        return made | ({"logprobs": self.logprobs} if self.logprobs else {})

    def sampled(self, sampling: Sampling) -> RequestKind:
        """Return this kind with another sampling."""
        return replace(self, sampling=sampling)

    def formed(self) -> RequestKind:
        """Return this kind with answers that must match `SCHEMA`."""
        return replace(self, schema=SCHEMA)

    def ruled(self) -> RequestKind:
        """Return this kind with penalties, a logit bias and log-probabilities."""
        return replace(self, sampling=RULES, logprobs=5)

    def traced(self) -> RequestKind:
        """Return this kind with a trace of every round."""
        return replace(self, speculation={**self.speculation, "trace": True})


SCHEMA: Mapping[str, Any] = {
    "type": "array",
    "minItems": 500,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 24},
            "kind": {"enum": ["river", "lake", "sea"]},
            "depth": {"type": "integer"},
            "salty": {"type": "boolean"},
        },
        "required": ["name", "kind", "depth", "salty"],
        "additionalProperties": False,
    },
}
"""The schema of the part `form`.

Its texts are longer than the answers of a measurement, so all answers have the same number of tokens."""


RULES: Sampling = {
    **GREEDY,
    "presence_penalty": 0.4,
    "frequency_penalty": 0.3,
    "repetition_penalty": 1.1,
    "logit_bias": {"11": 1.5, "12": -1.5},
}
"""The sampling of the part `rules`."""


def _tree(depth: int, topk: int, max_nodes: int) -> RequestKind:
    return RequestKind({"mode": "on", "depth": depth, "topk": topk, "max_nodes": max_nodes})


PLAIN = RequestKind()
AUTO = RequestKind({"mode": "auto"})
CHAIN = _tree(3, 1, 4)
TREE = _tree(5, 8, 32)


@dataclass(frozen=True, slots=True)
class MixedSizes:
    """Sizes of the cases of `outrider bench mixed`, in tokens unless noted otherwise.

    The parts of the benchmark are called `odd`, `auto`, `form`, `rules`, `gap`, `ttft` and `soak`.

    Attributes:
        batch: Number of equal requests in a case of `odd`.
        pairs: Number of pairs of runs. The figures are medians over the pairs.
        prompt, new: Lengths of the prompt and of the answer in `odd`. `prompt` is also the length of the
            prompts of `auto`.
        auto_batches: Numbers of requests that `auto` runs at the same time.
        form_batches: Numbers of requests with a schema that `form` runs at the same time.
        rules_batches: Numbers of requests with penalties that `rules` runs at the same time.
        auto_new: Lengths of the answers of `auto`.
        longest: Length of the long prompt of `gap`, and of the longest prompt of `soak`.
        stream: Length of the longest answer of the running streams of `gap`.
        ttft: Lengths of the prompts of `ttft`.
        soak_prompts, soak_answers: Lengths of prompts and of answers among which the clients of `soak`
            choose.
        seconds: Time, in seconds, during which the clients of `soak` send requests, for each mix of requests.
        clients: Number of clients of `soak`.
        seed: Seed of the prompts and of the soak's choices.
    """

    batch: int
    pairs: int
    prompt: int
    new: int
    auto_batches: Sequence[int]
    form_batches: Sequence[int]
    rules_batches: Sequence[int]
    auto_new: Sequence[int]
    longest: int
    stream: int
    ttft: Sequence[int]
    soak_prompts: Sequence[int]
    soak_answers: Sequence[int]
    seconds: float
    clients: int
    seed: int


@dataclass(frozen=True, slots=True)
class Pairing:
    """A case of `outrider bench mixed`: a batch of equal requests, and one other request that runs beside it.

    Attributes:
        name: Name of the case. It names both kinds of requests.
        usual: Kind of the requests of the batch.
        odd: Kind of the other request. For comparison, the batch also runs beside one more request of the
            usual kind.
        goal: Smallest acceptable ratio of two speeds of the batch: beside the other kind, and beside its own
            kind. None if no goal was set.
    """

    name: str
    usual: RequestKind
    odd: RequestKind
    goal: float | None = None


@dataclass(frozen=True, slots=True)
class RunningStreams:
    """A case of `gap`: streams that run while a long prompt is processed.

    Attributes:
        name: Name of the case.
        kind: Kind of the streams and of the long prompt.
        pause_goal_ms: Longest acceptable pause of a stream, in milliseconds. None if no goal was set.
        ttft_goal: Largest acceptable ratio of two TTFTs of the long prompt: beside the streams, and alone.
            None if no goal was set.
    """

    name: str
    kind: RequestKind
    pause_goal_ms: float | None = None
    ttft_goal: float | None = None

    def without_goals(self) -> RunningStreams:
        """Return the same case without goals."""
        return replace(self, pause_goal_ms=None, ttft_goal=None)


@dataclass(frozen=True, slots=True)
class SpeculationMix:
    """A case of `soak`: kinds of speculation among which the clients choose.

    Attributes:
        name: Name of the case.
        kinds: The kinds of speculation.
        tok_s_goal: Smallest acceptable number of tokens per second. None if no goal was set.
        p99_goal_s: Longest acceptable 99th percentile of the latency, in seconds. None if no goal was set.
    """

    name: str
    kinds: Sequence[RequestKind]
    tok_s_goal: float | None = None
    p99_goal_s: float | None = None

    def without_goals(self) -> SpeculationMix:
        """Return the same case without goals."""
        return replace(self, tok_s_goal=None, p99_goal_s=None)


NO_COST_GOAL = 0.97
"""Goal for an odd request that needs no more work than one more usual request."""
BESIDE_CHAIN_GOAL, BESIDE_TREE_GOAL, CHAINS_BESIDE_TREE_GOAL = 0.85, 0.76, 0.83
"""Goals if the odd request drafts. The time of its draft pass is then part of every sequence's round."""
AUTO_GOAL = 0.985
"""Goal of `auto` ÷ `off`, i.e. of the cost of finding out whether a draft pays."""

PAIRINGS: Sequence[Pairing] = (
    *(
        Pairing(f"greedy beside one with {name}", PLAIN, PLAIN.sampled(sampling), NO_COST_GOAL)
        for name, sampling in SAMPLINGS.items()
    ),
    *(
        Pairing(f"chain 3 beside one with {name}", CHAIN, CHAIN.sampled(sampling), NO_COST_GOAL)
        for name, sampling in SAMPLINGS.items()
    ),
    Pairing("sampled beside one greedy", PLAIN.sampled(SAMPLINGS["temperature"]), PLAIN, NO_COST_GOAL),
    Pairing("plain beside one traced", PLAIN, PLAIN.traced(), NO_COST_GOAL),
    Pairing("chain 3 beside one traced", CHAIN, CHAIN.traced(), NO_COST_GOAL),
    Pairing("chain 3 beside one off", CHAIN, PLAIN, NO_COST_GOAL),
    Pairing("tree beside one off", TREE, PLAIN, NO_COST_GOAL),
    Pairing("plain beside one chain 3", PLAIN, CHAIN, BESIDE_CHAIN_GOAL),
    Pairing("plain beside one tree", PLAIN, TREE, BESIDE_TREE_GOAL),
    Pairing("plain beside one traced tree", PLAIN, TREE.traced(), BESIDE_TREE_GOAL),
    Pairing("auto beside one chain 3", AUTO, CHAIN, BESIDE_CHAIN_GOAL),
    Pairing("auto beside one tree", AUTO, TREE, BESIDE_TREE_GOAL),
    Pairing("auto beside one traced tree", AUTO, TREE.traced(), BESIDE_TREE_GOAL),
    Pairing("chain 3 beside one tree", CHAIN, TREE, CHAINS_BESIDE_TREE_GOAL),
)
"""The cases of `odd`."""

FORM_GOALS: Mapping[int, float] = {1: 0.909, 16: 0.833}
"""Goals of the speed of a batch with a schema ÷ its speed without, by the size of the batch."""
BESIDE_FORM = Pairing("plain beside one with a schema", PLAIN, PLAIN.formed(), 0.93)
RULES_GOALS: Mapping[int, float] = {1: 0.952, 16: 0.926, 64: 0.893}
"""Goals of the speed of a batch with penalties and log-probabilities ÷ its speed without, by its size."""
COMPARED: Mapping[str, RequestKind] = {"plain": PLAIN, "chain 3": CHAIN, "tree": TREE}
"""The kinds of requests of `form`, with and without a schema, and of `rules`, with and without penalties."""

STREAMS: Sequence[RunningStreams] = (
    RunningStreams("plain", PLAIN, pause_goal_ms=35, ttft_goal=1.5),
    RunningStreams("tree", TREE, ttft_goal=1.5),
)
"""The cases of `gap`."""

TTFT_GOALS_MS: Mapping[int, float] = {
    16: 8,
    256: 10,
    300: 14,
    512: 18,
    1024: 27,
    2048: 50,
    8192: 222,
    32_768: 1300,
}
"""Goals of `ttft` in milliseconds, by the length of the prompt. These are also the default lengths."""

MIXES: Sequence[SpeculationMix] = (
    SpeculationMix("plain", (PLAIN,)),
    SpeculationMix("off and auto", (PLAIN, AUTO, AUTO, AUTO), tok_s_goal=4000, p99_goal_s=12),
    SpeculationMix(
        "every shape",
        (PLAIN, AUTO, AUTO, AUTO, CHAIN, TREE, _tree(2, 3, 8), _tree(4, 2, 10).traced()),
        tok_s_goal=2500,
        p99_goal_s=18,
    ),
)
"""The cases of `soak`. A server without the `speculation` object, or without a draft, gets only the first
case."""

SOAK_SAMPLINGS: Sequence[Sampling] = (GREEDY, *SAMPLINGS.values())
SOAK_PROMPTS = (1, 5, 60, 300, 700, 2000)
SOAK_ANSWERS = (1, 2, 16, 64, 200, 500)
LONGEST = 12_000

GOAL_SIZES: Mapping[Section, Mapping[str, int | Sequence[int]]] = {
    Section.GAP: {"prompt": 256, "longest": LONGEST, "stream": 600},
    Section.SOAK: {
        "clients": 120,
        "longest": LONGEST,
        "soak_prompts": SOAK_PROMPTS,
        "soak_answers": SOAK_ANSWERS,
    },
}
"""The only sizes for which `gap` and `soak` have goals: fields of `MixedSizes` → their default values."""

GOALS_HOLD_FOR = (
    "The goals are for an H200, a model in the shape of Llama-3.1-8B in bf16, and --max-running-requests 64."
)
"""Printed below the table of figures."""
