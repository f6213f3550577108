"""Decides which cases of `outrider bench mixed` run against a server, with which sizes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial

from outrider.bench.load.samplings import Sampling
from outrider.bench.load.server import Server
from outrider.bench.mixed.cases import (
    AUTO,
    BESIDE_FORM,
    COMPARED,
    FORM_GOALS,
    GOAL_SIZES,
    LONGEST,
    MIXES,
    PAIRINGS,
    PLAIN,
    RULES_GOALS,
    SOAK_ANSWERS,
    SOAK_PROMPTS,
    SOAK_SAMPLINGS,
    STREAMS,
    TTFT_GOALS_MS,
    MixedSizes,
    RequestKind,
    Section,
)
from outrider.bench.mixed.client import MixedClient, RequestFormat
from outrider.bench.mixed.figures import MixedFigure
from outrider.bench.mixed.pauses import measure_gap, measure_ttft
from outrider.bench.mixed.ratios import measure_auto, measure_cost, measure_odd
from outrider.bench.mixed.soak import measure_soak
from outrider.shared.base.errors import ConfigurationError

BATCH, AUTO_BATCHES, AUTO_NEW = 32, (1, 16, 64), (256, 1500)
SHORTEST_STREAM = 64
UNLIMITED = 1 << 31
"""Stands for a limit that the server does not state."""
VOCAB = 1000
"""Vocabulary size that is assumed if a server does not report one. Most models have more ids."""

Only = Mapping[Section, Sequence[str]]
"""Parts to run → patterns of the names of their cases."""


@dataclass(frozen=True, slots=True)
class Wishes:
    """Sizes given on the command line. With None, a default applies, reduced to what the server allows."""

    batch: int | None
    pairs: int
    prompt: int
    new: int
    auto_batches: Sequence[int] | None
    auto_new: Sequence[int] | None
    longest: int | None
    ttft: Sequence[int] | None
    seconds: float
    clients: int
    seed: int


@dataclass(frozen=True, slots=True)
class MixedCase:
    """One case of `outrider bench mixed`.

    Attributes:
        section, name: Part of the benchmark, and name of the case.
        kinds: All kinds of requests that the case sends.
        measure: Function that runs the case and returns its figures.
    """

    section: Section
    name: str
    kinds: Sequence[RequestKind]
    measure: Callable[[MixedClient], Awaitable[list[MixedFigure]]]


def parse_only(text: str) -> Only:
    """Parse `--only`: parts such as ``odd``, or parts with a pattern for case names such as ``odd:*tree*``.

    Raises:
        ConfigurationError: A part is unknown.
    """
    wanted: dict[Section, list[str]] = {}
    for entry in text.split(","):
        part, _, pattern = entry.strip().partition(":")
        try:
            section = Section(part)
        except ValueError:
            known = ", ".join(section.value for section in Section)
            raise ConfigurationError(
                f"--only {entry.strip()}: expected a comma-separated list of {known}, each with an optional "
                "pattern of names such as odd:*tree*.",
                field="--only",
            ) from None
        wanted.setdefault(section, []).append(pattern or "*")
    return wanted


def sizes_for(wishes: Wishes, server: Server, only: Only) -> MixedSizes:
    """Return the sizes of the cases. Default sizes are reduced to the server's limits; given sizes are not.

    Raises:
        ConfigurationError: A given value exceeds the server's context, or its limit of running requests.
    """
    # 1. What is given must fit.
    context, running = server.max_model_len or UNLIMITED, server.max_running or UNLIMITED
    prompt, new = wishes.prompt, wishes.new
    answers = _fitting(SOAK_ANSWERS, min(2 * new, context - prompt))
    longest_answer = max(answers, default=1)
    checks = (
        ("--prompt-tokens plus --new-tokens", prompt + new, context),
        ("--auto-tokens plus --prompt-tokens", max(wishes.auto_new or (0,)) + prompt, context),
        ("--ttft plus one", max(wishes.ttft or (0,)) + 1, context),
        (f"--longest plus {longest_answer}", (wishes.longest or 0) + longest_answer, context),
    )
    for flag, tokens, limit in checks:
        _check(flag, tokens, limit, "tokens of context", "")
    fix = " or start the server with a higher --max-running-requests"
    if Section.ODD in only or Section.FORM in only:
        _check("--batch plus one", (wishes.batch or 0) + 1, running, "running requests", fix)
    if Section.AUTO in only:
        _check("--auto-batch", max(wishes.auto_batches or (0,)), running, "running requests", fix)

    # 2. Defaults are reduced to what fits.
    return MixedSizes(
        batch=wishes.batch or max(1, min(BATCH, running - 1)),
        pairs=wishes.pairs,
        prompt=prompt,
        new=new,
        auto_batches=wishes.auto_batches or _fitting(AUTO_BATCHES, running),
        form_batches=_fitting(tuple(FORM_GOALS), running),
        rules_batches=_fitting(tuple(RULES_GOALS), running),
        auto_new=wishes.auto_new or _fitting(AUTO_NEW, context - prompt),
        longest=wishes.longest or min(LONGEST, context - longest_answer),
        stream=min(max(2 * new, SHORTEST_STREAM), context - prompt),
        ttft=wishes.ttft or _fitting(tuple(TTFT_GOALS_MS), context - 1),
        soak_prompts=_fitting(SOAK_PROMPTS, min(8 * prompt, context - longest_answer)),
        soak_answers=answers,
        seconds=wishes.seconds,
        clients=wishes.clients,
        seed=wishes.seed,
    )


def plan_cases(
    only: Only, sizes: MixedSizes, server: Server, api: RequestFormat, omitted: Collection[str]
) -> tuple[list[MixedCase], dict[str, str]]:
    """Return the cases to run, and the reason for each case that is left out.

    Raises:
        ConfigurationError: No case is left.
    """
    samplings = [one for one in SOAK_SAMPLINGS if not set(one) & set(omitted)]
    chosen = [
        case
        for case in _all_cases(sizes, samplings)
        if any(fnmatchcase(case.name, pattern) for pattern in only.get(case.section, ()))
    ]
    cases, skipped = [], {}
    for case in chosen:
        reason = next(filter(None, (_hindrance(kind, server, api, omitted) for kind in case.kinds)), None)
        if reason is None:
            cases.append(case)
        else:
            skipped[f"{case.section.value}: {case.name}"] = reason
    if not cases:
        reasons = ", ".join(sorted(set(skipped.values()))) or "no case has such a name"
        raise ConfigurationError(
            f"--only leaves no case to run: {reasons}. Choose other parts or another server.", field="--only"
        )
    return cases, skipped


def _all_cases(sizes: MixedSizes, samplings: Sequence[Sampling]) -> Iterable[MixedCase]:
    for pairing in PAIRINGS:
        kinds = (pairing.usual, pairing.odd)
        yield MixedCase(Section.ODD, pairing.name, kinds, partial(measure_odd, pairing=pairing, sizes=sizes))
    for batch in sizes.auto_batches:
        for new in sizes.auto_new:
            measure = partial(measure_auto, batch=batch, new=new, sizes=sizes)
            yield MixedCase(Section.AUTO, f"batch {batch}, {new} tokens", (AUTO, PLAIN), measure)
    for name, kind in COMPARED.items():
        for batch in sizes.form_batches:
            goal = FORM_GOALS[batch]
            yield _cost_case(Section.FORM, name, (kind, kind.formed()), batch, goal, sizes)
        for batch in sizes.rules_batches:
            goal = RULES_GOALS[batch]
            yield _cost_case(Section.RULES, name, (kind, kind.ruled()), batch, goal, sizes)
    beside = partial(measure_odd, pairing=BESIDE_FORM, sizes=sizes, section=Section.FORM)
    yield MixedCase(Section.FORM, BESIDE_FORM.name, (BESIDE_FORM.usual, BESIDE_FORM.odd), beside)
    for streams in STREAMS:
        case = streams if _have_goals(Section.GAP, sizes) else streams.without_goals()
        yield MixedCase(Section.GAP, case.name, (case.kind,), partial(measure_gap, streams=case, sizes=sizes))
    for length in sizes.ttft:
        measure_length = partial(measure_ttft, length=length, goal_ms=TTFT_GOALS_MS.get(length))
        yield MixedCase(Section.TTFT, f"prompt of {length}", (PLAIN,), measure_length)
    for one in MIXES:
        mix = one if _have_goals(Section.SOAK, sizes) else one.without_goals()
        measure_mix = partial(measure_soak, mix=mix, samplings=samplings, sizes=sizes)
        yield MixedCase(Section.SOAK, mix.name, mix.kinds, measure_mix)


def _have_goals(section: Section, sizes: MixedSizes) -> bool:
    """Return True if the goals of a part hold for these sizes."""
    return all(getattr(sizes, name) == size for name, size in GOAL_SIZES[section].items())


def _cost_case(
    section: Section,
    name: str,
    kinds: tuple[RequestKind, RequestKind],
    batch: int,
    goal: float,
    sizes: MixedSizes,
) -> MixedCase:
    name = f"{name} at batch {batch}"
    measure = partial(
        measure_cost, section=section, name=name, kinds=kinds, batch=batch, goal=goal, sizes=sizes
    )
    return MixedCase(section, name, kinds, measure)


def _hindrance(kind: RequestKind, server: Server, api: RequestFormat, omitted: Collection[str]) -> str | None:
    """Return why a server cannot get requests of a kind, or None if it can."""
    if (api is RequestFormat.OPENAI or "speculation" in omitted) and not kind.is_plain:
        return "the case needs Outrider's speculation field"
    if left_out := set(kind.sampling) & set(omitted):
        return f"--omit {min(left_out)}"
    if kind.drafts and server.draft_state == "none":
        return "the server has no draft"
    for name, limit in server.shape_limits.items():
        if kind.speculation.get(name, 0) > limit:
            return f"the server allows {name} up to {limit}"
    return None


def _fitting(defaults: Sequence[int], limit: int) -> tuple[int, ...]:
    return tuple(size for size in defaults if size <= limit)


def _check(flag: str, value: int, limit: int, what: str, fix: str) -> None:
    if value > limit:
        raise ConfigurationError(
            f"{flag} is {value}, but the server allows {limit} {what}. Give a smaller number{fix}.",
            field=flag.split()[0],
        )
