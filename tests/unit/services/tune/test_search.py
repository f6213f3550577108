"""The search for the best shape and mode, against a synthetic server whose best shape is known."""

from __future__ import annotations

import math
import random
import tomllib
from collections.abc import Sequence
from dataclasses import replace

import pytest

from outrider.services.tune.candidates import AutoLimits, candidate_shapes
from outrider.services.tune.check import check_choice
from outrider.services.tune.live import LiveAnswer, LiveRun
from outrider.services.tune.modes import shapes_within
from outrider.services.tune.profile import profile_text, profile_values
from outrider.services.tune.report import result_json
from outrider.services.tune.result import BatchResult, TuneResult, TuneSizes
from outrider.services.tune.run_count import RunCount
from outrider.services.tune.search import FINALISTS, finalists, prompt_parts, search
from outrider.shared.base.errors import ConfigurationError
from outrider.shared.base.generation import SpeculationMode
from outrider.shared.obs.progress import Progress
from outrider.shared.spec.tree import NO_DRAFT, DraftShape

LIMITS = DraftShape(8, 8, 64)
VOCABULARY = 50


class SyntheticServer:
    """Drafts chains that are right with a fixed probability, on a machine with known times.

    With noise, its speed drifts by that share in about a second, and a few runs take far longer.
    """

    def __init__(
        self, rate: float, node_ms: float, auto_ms: float = 0.0, noise: float = 0.0, seed: int = 0
    ) -> None:
        self.rate = rate
        self.node_ms = node_ms
        self.auto_ms = auto_ms
        self.noise = noise
        self.rng = random.Random(seed)
        self.drift = 0.0
        self.seconds = 0.0
        self.limits: set[AutoLimits] = set()

    def round_ms(self, shape: DraftShape, streams: int) -> float:
        drafting = 0.4 + 0.2 * shape.depth if shape.drafts else 0.0
        return drafting + 4.0 + self.node_ms * streams * shape.max_nodes

    def run(
        self,
        prompts: Sequence[Sequence[int]],
        shape: DraftShape,
        *,
        streams: int,
        tokens: int,
        trace: bool = False,
    ) -> LiveRun:
        answers, rounds, extra_ms = [], 0, 0.0
        if isinstance(shape, AutoLimits):
            self.limits.add(shape)
            shape, extra_ms = self._best_within(shape.shape, streams), self.auto_ms
        for prompt in prompts:
            answer = self._answer(random.Random(prompt[0]), prompt, shape, streams, tokens)
            rounds += len(answer.rounds)
            answers.append(answer if trace else LiveAnswer(len(prompt), answer.token_ids))
        waves = rounds / min(streams, len(prompts))
        seconds = waves * (self.round_ms(shape, streams) + extra_ms) / 1e3
        seconds *= math.exp(self._disturbed(seconds))
        self.seconds += seconds
        return LiveRun(answers, seconds)

    def _disturbed(self, seconds: float) -> float:
        """Return the logarithm of the factor by which the machine is slower than usual at the moment."""
        kept = math.exp(-seconds)
        self.drift = kept * self.drift + math.sqrt(1 - kept * kept) * self.rng.gauss(0, self.noise)
        burst = self.rng.uniform(1, 5) * self.noise if self.rng.random() < 0.05 else 0.0
        return self.drift + self.rng.gauss(0, self.noise / 3) + burst

    def _best_within(self, limits: DraftShape, streams: int) -> DraftShape:
        """Return the shape that a perfect controller chooses."""

        def speed(shape: DraftShape) -> float:
            length = sum(self.rate**depth for depth in range(shape.columns))
            return length / self.round_ms(shape, streams)

        return max((NO_DRAFT, *shapes_within(limits, streams)), key=speed)

    def _answer(
        self, rng: random.Random, prompt: Sequence[int], shape: DraftShape, streams: int, tokens: int
    ) -> LiveAnswer:
        answer = LiveAnswer(len(prompt), [rng.randrange(VOCABULARY) for _ in range(tokens)])
        at = 1
        while at < tokens:
            nodes = [{"token": answer.token_ids[at - 1], "parent": -1, "logprob": 0.0}]
            accepted, right = 0, True
            for depth in range(min(shape.depth, shape.max_nodes - 1)):
                right = right and at + depth < tokens and rng.random() < self.rate
                token = answer.token_ids[at + depth] if right else VOCABULARY
                accepted += right
                nodes.append({"token": token, "parent": depth, "logprob": -0.1})
            draft_ms = 0.4 + 0.2 * shape.depth if shape.drafts else 0.0
            answer.rounds.append(
                {
                    "base_len": len(prompt) + at,
                    "nodes": nodes,
                    "draft_ms": draft_ms,
                    "verify_ms": self.round_ms(shape, streams) - draft_ms,
                }
            )
            at += accepted + 1
        answer.last_s = len(answer.rounds) * self.round_ms(shape, streams) / 1e3
        return answer


PROMPTS = [[number] * 5 for number in range(16)]


def tune(server: SyntheticServer, *, exhaustive: bool = False, batches: Sequence[int] = (1, 4)):  # type: ignore[no-untyped-def]
    return search(server, PROMPTS, TuneSizes(batches, 96, LIMITS, exhaustive=exhaustive))  # type: ignore[arg-type]


@pytest.mark.parametrize("rate", [0.4, 0.8])
@pytest.mark.parametrize("node_ms", [0.002, 0.08])
def test_the_choice_is_close_to_the_exhaustive_best(rate: float, node_ms: float) -> None:
    tuned, whole = SyntheticServer(rate, node_ms), SyntheticServer(rate, node_ms)
    found, best = tune(tuned), tune(whole, exhaustive=True)
    for one, other in zip(found.batches, best.batches, strict=True):
        assert one.measured[one.best] >= 0.97 * other.measured[other.best]
        assert one.exhaustive_s > 0
    assert tuned.seconds < whole.seconds / 8
    measured = found.batches[0].measured
    assert len(measured) == 1 + FINALISTS
    assert {shape.topk == 1 for shape in measured if shape.drafts} == {True, False}


SERVED = DraftShape(16, 16, 128)
"""The limits of a server with default settings."""


def test_the_choice_is_within_3_percent_in_a_tenth_of_the_time_despite_8_percent_of_noise() -> None:
    prompts, sizes = PROMPTS[:8], TuneSizes((1,), 48, SERVED)
    quiet = SyntheticServer(0.85, 0.05)
    search(quiet, prompts, replace(sizes, exhaustive=True))  # type: ignore[arg-type]
    whole_s = quiet.seconds
    true = {
        shape: quiet.run(prompts, shape, streams=1, tokens=48).tokens_per_s
        for shape in candidate_shapes(SERVED)
    }
    wrong = 0
    for seed in range(12):
        server = SyntheticServer(0.85, 0.05, noise=0.08, seed=seed)
        (found,) = search(server, prompts, sizes).batches  # type: ignore[arg-type]
        wrong += true[found.best] < 0.97 * max(true.values())
        assert server.seconds < whole_s / 10
        assert found.exhaustive_s == pytest.approx(whole_s, rel=0.15), "the estimate of the report"
    assert wrong <= 1


def test_shapes_that_differ_little_take_only_one_place_among_the_finalists() -> None:
    chains = {DraftShape(depth, 1, depth + 1): 2.0 + depth / 100 for depth in range(1, 9)}
    trees = {DraftShape(10, topk, 16): 3.0 - topk / 100 for topk in (2, 4, 8)}
    found = finalists(chains | trees | {DraftShape(10, 8, 32): 2.5})
    assert found == [
        DraftShape(10, 2, 16),
        DraftShape(10, 8, 32),
        *sorted(chains, key=lambda one: -one.depth)[:4],
    ]
    assert DraftShape(3, 2, 8) in finalists(chains | {DraftShape(3, 2, 8): 0.5}), (
        "one tree is always measured"
    )


def test_requests_that_run_one_at_a_time_alternate_after_each_prompt() -> None:
    assert prompt_parts(3, 1) == [[0], [1], [2]]
    assert prompt_parts(3, 2) == [[0, 1, 2]]
    assert prompt_parts(2, 5) == [[0, 1, 0, 1, 0]]


def test_a_shape_that_dropped_out_is_not_chosen() -> None:
    chain, tree = DraftShape(3, 1, 4), DraftShape(5, 4, 16)
    measured = {NO_DRAFT: 100.0, chain: 200.0, tree: 201.0}
    found = BatchResult(1, {chain: 2.0, tree: 2.0}, measured, left=[chain])
    assert (found.best, replace(found, left=()).best) == (chain, tree)
    assert TuneResult({chain: 3.0, tree: 4.0}, [found]).shape == chain


def test_prompts_with_empty_answers_are_left_out() -> None:
    class Silent(SyntheticServer):
        silent = 1

        def _answer(self, rng, prompt, *given):  # type: ignore[no-untyped-def]
            return (
                LiveAnswer(len(prompt)) if prompt[0] < self.silent else super()._answer(rng, prompt, *given)
            )

    sizes = TuneSizes((1, 2), 48, LIMITS)
    found = search(Silent(0.8, 0.002), PROMPTS[:3], sizes)  # type: ignore[arg-type]
    assert all(one.measured[one.best] > 0 for one in found.batches)
    server = Silent(0.8, 0.002)
    server.silent = 3
    with pytest.raises(ConfigurationError, match="--prompts"):
        search(server, PROMPTS[:3], sizes)  # type: ignore[arg-type]


def test_the_first_rounds_with_a_shape_do_not_count() -> None:
    class Recording(SyntheticServer):
        """Records something for a second when a shape is used for the first time."""

        def __init__(self, rate: float, node_ms: float) -> None:
            super().__init__(rate, node_ms)
            self.seen: set[DraftShape] = set()

        def run(self, prompts, shape, **options):  # type: ignore[no-untyped-def]
            done = super().run(prompts, shape, **options)
            first = shape not in self.seen
            self.seen.add(shape)
            return replace(done, seconds=done.seconds + first)

    slow, usual = (tune(made(0.8, 0.002), batches=(1,)).batches[0] for made in (Recording, SyntheticServer))
    assert slow.best == usual.best
    assert slow.measured == pytest.approx(usual.measured)


def test_a_slow_measurement_of_plain_rounds_does_not_spoil_the_predictions() -> None:
    class SlowFirst(SyntheticServer):
        def round_ms(self, shape: DraftShape, streams: int) -> float:
            return super().round_ms(shape, streams) * (6.0 if not shape.drafts and not self.finals else 1.0)

        finals = 0

        def run(self, *given, trace: bool = False, **options):  # type: ignore[no-untyped-def]
            self.finals += not trace
            return super().run(*given, trace=trace, **options)

    (slow,), (usual,) = (
        tune(made(0.8, 0.002), batches=(1,)).batches for made in (SlowFirst, SyntheticServer)
    )
    for shape, speed in usual.predicted.items():
        assert slow.predicted[shape] == pytest.approx(speed, rel=0.1)


def test_a_check_compares_the_choice_with_the_best_of_all_shapes() -> None:
    server = SyntheticServer(0.8, 0.002)
    sizes = TuneSizes((1,), 96, LIMITS, check=2)
    (found,) = search(server, PROMPTS, sizes).batches  # type: ignore[arg-type]
    assert found.check is not None
    assert found.check.choice == found.best
    assert len(found.check.ratios) == 2
    assert 0.97 <= found.check.ratio <= 1
    assert found.exhaustive_s >= sizes.passes * found.check.seconds


def test_a_check_finds_a_wrong_choice_and_favours_no_shape() -> None:
    rng = random.Random(3)
    equal = {DraftShape(depth, 1, depth + 1): 200.0 for depth in range(1, 9)}
    slow = DraftShape(5, 4, 16)

    def run(shape: DraftShape, part: int) -> float:
        return (equal | {slow: 180.0})[shape] * rng.lognormvariate(0, 0.08)

    found = check_choice(run, slow, [*equal, slow], [10] * 8, 21)
    assert found.best in equal
    assert found.ratio == pytest.approx(0.9, abs=0.03)
    # The best shape of noisy measurements is as fast as the others once it is measured again.
    ratios = [check_choice(run, shape, list(equal), [10] * 8, 9).ratio for shape in equal]
    assert sum(ratios) / len(ratios) == pytest.approx(1, abs=0.015)


def test_a_draft_that_is_never_right_gets_no_shape() -> None:
    result = tune(SyntheticServer(0.0, 0.01))
    assert result.mode is SpeculationMode.OFF
    assert profile_values(result) == {"speculation_mode": "off"}
    assert result.shape == NO_DRAFT
    assert [one.best for one in result.batches] == [NO_DRAFT, NO_DRAFT]
    text = profile_text(result, "target", "draft")
    assert "num_steps" not in text
    assert "did not pay" in text
    assert tomllib.loads(text) == {"speculation_mode": "off"}


@pytest.mark.parametrize("rate", [0.5, 0.8])
def test_a_good_draft_gets_mode_auto_within_limits_that_cost_no_speed(rate: float) -> None:
    server = SyntheticServer(rate, 0.02)
    result = tune(server, batches=(1, 8))
    assert result.mode is SpeculationMode.AUTO
    assert server.limits == {result.limits}, "mode auto is measured with the limits of the profile"
    assert result.limits is not None
    assert tomllib.loads(profile_text(result, "target", "draft")) == {
        "speculation_mode": "auto",
        "num_steps": result.limits.depth,
        "topk": result.limits.topk,
        "num_draft_tokens": result.limits.max_nodes,
    }
    for one in result.batches:
        assert one.auto is not None
        assert one.auto >= 0.95 * one.measured[one.best]
    # This draft proposes chains, so wider trees would only cost time.
    assert result.limits.topk == 1


def test_a_slow_mode_auto_loses_to_the_best_shape() -> None:
    result = tune(SyntheticServer(0.8, 0.002, auto_ms=3.0))
    assert result.mode is SpeculationMode.ON
    values = profile_values(result)
    assert (values["speculation_mode"], values["num_steps"]) == ("on", result.shape.depth)


def test_one_batch_size_at_which_mode_auto_is_as_fast_keeps_it() -> None:
    result = tune(SyntheticServer(0.8, 0.002, auto_ms=3.0))
    first, second = result.batches
    equal = replace(second, to_auto={shape: [1.05, 0.99, 1.04] for shape in second.to_auto})
    assert TuneResult(result.accept_lengths, [first, equal], 0, result.limits).mode is SpeculationMode.AUTO


def test_the_profile_has_the_shape_and_the_speeds() -> None:
    result = tune(SyntheticServer(0.8, 0.002))
    assert result.limits is not None
    text = profile_text(result, "a\ntarget", "draft")
    assert f"num_steps = {result.limits.depth}\n" in text
    assert f"num_draft_tokens = {result.limits.max_nodes}\n" in text
    assert "# batch 1: auto " in text
    assert "# Target: a target\n" in text
    report = result_json(result)
    assert report["batches"][0]["ratios_to_plain"]["plain"] == [1.0]
    assert report["shape"]["topk"] == result.shape.topk
    assert report["profile"] == {"speculation_mode": "auto", **report["limits"]}
    assert report["batches"][0]["tokens_per_s"]["auto"] > 0
    first = report["batches"][0]
    assert len(first["ratios_to_auto"]["plain"]) == 1
    assert len(first["ratios_to_auto"][first["best"]]) == 3
    assert len(report["accept_lengths"]) == len(candidate_shapes(LIMITS))


@pytest.mark.parametrize("check", [0, 1])
def test_the_progress_of_a_search_grows_with_its_runs_up_to_the_end(check: int) -> None:
    told: list[float] = []

    class Kept(Progress):
        def tell(self, done: float, total: float | None = None, step: str = "") -> None:
            told.append(done)

    sizes = TuneSizes((1, 4), 48, LIMITS, check=check)
    count = RunCount(Kept("tune", 1.0), sizes, len(PROMPTS))

    class Counted(SyntheticServer):
        def run(self, *given, **options):  # type: ignore[no-untyped-def]
            done = super().run(*given, **options)
            count.ran()
            return done

    search(Counted(0.8, 0.002), PROMPTS, sizes, batch_done=count.batch_done)  # type: ignore[arg-type]
    assert told == sorted(told)
    assert 0 < told[0] < 0.1
    assert told[-1] == 1.0
    # The estimate before the end of the last batch size is near the end.
    assert told[-2] > 0.9
