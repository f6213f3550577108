"""The request options and the ways to speculate that `outrider verify` compares."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from outrider.services.target.grammar.matcher import Grammar
from outrider.services.target.request import EngineRequest, SpeculationLimits, SpeculationParams
from outrider.shared.base.constraint import Constraint, ConstraintKind
from outrider.shared.base.generation import MAX_SEED, SamplingParams, SpeculationMode
from outrider.shared.base.logit_rules import NO_LOGPROBS, LogitRules, LogprobParams
from outrider.shared.base.token_states import NO_STATES, StateParams
from outrider.shared.spec.tree import DraftShape

STOP_OPTION = "stop_token_ids"
TEXT_STOP_OPTION = "stop"
_SCHEMA = (
    '{"type": "object", "properties": {"name": {"type": "string", "maxLength": 8}, "rank": '
    '{"enum": [1, 2, 3]}, "open": {"type": "boolean"}}, '
    '"required": ["name", "rank", "open"], "additionalProperties": false}'
)
_EBNF = 'root ::= "capital: " word (", " word)*\nword ::= [A-Z] [a-z]+'


@dataclass(frozen=True, slots=True)
class CaseOptions:
    """The sampling and report options of one kind of request in `outrider verify`.

    Attributes:
        sampling: The sampling parameters.
        stops: True if the request has a stop token, which is taken from the middle of the greedy answer.
        ignore_eos: True to ignore the model's end-of-text tokens.
        share: Largest length of the answers, as a fraction of the answer length of the whole run.
        logprobs: The log-probabilities that the request asks for.
        states: The states of tokens that the request asks for.
        constraint: The constraint on the output. None if any output is allowed.
    """

    sampling: SamplingParams
    stops: bool = False
    ignore_eos: bool = True
    share: float = 1.0
    logprobs: LogprobParams = NO_LOGPROBS
    states: StateParams = NO_STATES
    constraint: Constraint | None = None


def _of_form(kind: ConstraintKind, source: str, sampling: SamplingParams) -> CaseOptions:
    return CaseOptions(sampling, ignore_eos=False, constraint=Constraint(kind, source))


GREEDY = SamplingParams(temperature=0.0)
OPTIONS: Mapping[str, CaseOptions] = {
    "greedy": CaseOptions(GREEDY),
    "end of text": CaseOptions(GREEDY, ignore_eos=False),
    STOP_OPTION: CaseOptions(GREEDY, stops=True),
    "max_tokens": CaseOptions(GREEDY, share=0.5),
    "temperature 0.7": CaseOptions(SamplingParams(temperature=0.7, seed=1)),
    "temperature 1": CaseOptions(SamplingParams(temperature=1.0, seed=2)),
    "temperature 1.5": CaseOptions(SamplingParams(temperature=1.5, seed=3)),
    "top_k": CaseOptions(SamplingParams(top_k=20, seed=4)),
    "top_p": CaseOptions(SamplingParams(top_p=0.9, seed=5)),
    "min_p": CaseOptions(SamplingParams(min_p=0.05, seed=6)),
    "all filters": CaseOptions(SamplingParams(temperature=0.8, top_k=40, top_p=0.95, min_p=0.02, seed=7)),
    "seed": CaseOptions(SamplingParams(seed=MAX_SEED)),
    "penalties": CaseOptions(SamplingParams(0.7, seed=8, rules=LogitRules(0.5, 0.5, 1.2))),
    "logit_bias": CaseOptions(SamplingParams(seed=9, rules=LogitRules(logit_bias=((1, 2.0), (2, -3.0))))),
    "min_tokens": CaseOptions(replace(GREEDY, rules=LogitRules(min_tokens=6)), ignore_eos=False),
    "bad_words": CaseOptions(SamplingParams(0.7, seed=10, rules=LogitRules(bad_words=((3,), (4, 5))))),
    "allowed_token_ids": CaseOptions(
        SamplingParams(0.7, seed=14, rules=LogitRules(allowed_token_ids=tuple(range(1, 64))))
    ),
    "n": CaseOptions(SamplingParams(seed=2, choice_index=1)),
    # The gateway chooses the best answers by the logprobs of their tokens.
    "best_of": CaseOptions(SamplingParams(0.8, seed=15, choice_index=2), logprobs=LogprobParams(top=0)),
    TEXT_STOP_OPTION: CaseOptions(GREEDY),
    "json_schema": _of_form(ConstraintKind.JSON_SCHEMA, _SCHEMA, GREEDY),
    "regex": _of_form(ConstraintKind.REGEX, "[A-Z][a-z]+( [a-z]+){0,9}\\.", SamplingParams(0.7, seed=16)),
    "choice": _of_form(ConstraintKind.CHOICE, '["yes, of course", "yes, but not now", "no"]', GREEDY),
    "ebnf": _of_form(ConstraintKind.GRAMMAR, _EBNF, SamplingParams(1.0, seed=17)),
    "logprobs": CaseOptions(GREEDY, logprobs=LogprobParams(top=5, prompt_top=2)),
    "logprobs of sampled tokens": CaseOptions(
        SamplingParams(0.9, top_p=0.95, seed=11, rules=LogitRules(0.2, 0.2)), logprobs=LogprobParams(top=20)
    ),
    "token_ids_logprob": CaseOptions(
        SamplingParams(0.7, seed=12),
        logprobs=LogprobParams(top=0, prompt_top=0, prompt_start=1, token_ids=(1, 2, 3)),
    ),
    "hidden states": CaseOptions(SamplingParams(0.7, seed=13), states=StateParams(hidden_states=True)),
    "routed experts": CaseOptions(
        SamplingParams(0.7, seed=18), states=StateParams(routed_experts=True, start=1)
    ),
    "sampled stop": CaseOptions(SamplingParams(temperature=0.7, seed=1), stops=True, ignore_eos=False),
}
"""Name → option. Tests check that every field of `SamplingParams` and every request option is in use."""


def ways(shape: DraftShape) -> Mapping[str, Sequence[SpeculationParams]]:
    """Return the runs with speculation, by name.

    Each run lists speculation settings. Its requests use these settings in turn.

    Args:
        shape: Shape of the trees.
    """
    limits = SpeculationLimits(shape)
    chain = limits.resolve(SpeculationMode.ON, topk=1, max_nodes=shape.depth + 1)
    tree, auto = limits.resolve(SpeculationMode.ON), limits.resolve(SpeculationMode.AUTO)
    return {
        "chain": [chain],
        "tree": [tree],
        "auto": [auto],
        "mixed": [tree, limits.resolve(SpeculationMode.OFF), chain, auto],
    }


def without_speculation(shape: DraftShape) -> Sequence[SpeculationParams]:
    """Return the speculation of the run without speculation."""
    return [SpeculationLimits(shape).resolve(SpeculationMode.OFF)]


def greedy_requests(
    prompts: Sequence[Sequence[int]], tokens: int, speculation: SpeculationParams
) -> list[EngineRequest]:
    """Return one greedy request for each prompt. The answers provide the stop tokens and stop strings."""
    return [
        EngineRequest(str(index), tuple(prompt), tokens, GREEDY, speculation, ignore_eos=True)
        for index, prompt in enumerate(prompts)
    ]


def requests_of(
    prompts: Sequence[Sequence[int]],
    tokens: int,
    speculation: Sequence[SpeculationParams],
    stop_tokens: Sequence[int],
    grammars: Mapping[str, Grammar] | None = None,
    *,
    experts: bool = False,
) -> dict[str, EngineRequest]:
    """Return request id → request, with one request for each combination of prompt and option.

    Args:
        prompts: Prompts as token ids.
        tokens: Largest length of the answers, in tokens.
        speculation: Speculation settings. The requests use them in turn.
        stop_tokens: The stop token of each prompt, for options with `CaseOptions.stops`.
        grammars: Name of the option → compiled constraint. Options whose grammar is missing are left out.
        experts: True if the target has routed experts. Otherwise, options that ask for them are left out.
    """
    grammars = grammars or {}
    requests: dict[str, EngineRequest] = {}
    for name, option in OPTIONS.items():
        if option.constraint is not None and name not in grammars:
            continue
        if option.states.routed_experts and not experts:
            continue
        for index, prompt in enumerate(prompts):
            request = EngineRequest(
                f"{name}, prompt {index + 1}",
                tuple(prompt),
                max(1, int(tokens * option.share)),
                option.sampling,
                speculation[len(requests) % len(speculation)],
                ignore_eos=option.ignore_eos,
                logprobs=option.logprobs,
                states=option.states,
                constraint=option.constraint,
                grammar=grammars.get(name),
            )
            if option.stops:
                request = replace(request, stop_token_ids=frozenset([stop_tokens[index]]))
            requests[request.request_id] = request
    return requests
