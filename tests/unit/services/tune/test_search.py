"""The search for the best shape, against a synthetic server whose best shape is known."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from outrider.services.tune.candidates import candidate_shapes
from outrider.services.tune.live import LiveAnswer, LiveRun
from outrider.services.tune.profile import profile_text
from outrider.services.tune.report import result_json
from outrider.services.tune.run_count import RunCount
from outrider.services.tune.search import FINALISTS, TuneSizes, search
from outrider.shared.obs.progress import Progress
from outrider.shared.spec.tree import NO_DRAFT, DraftShape

LIMITS = DraftShape(8, 8, 64)
VOCABULARY = 50


class SyntheticServer:
    """Drafts chains that are right with a fixed probability, on a machine with known times."""

    def __init__(self, rate: float, node_ms: float) -> None:
        self.rate = rate
        self.node_ms = node_ms
        self.tokens = 0

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
        answers, rounds = [], 0
        for number, prompt in enumerate(prompts):
            answer = self._answer(random.Random(number), prompt, shape, streams, tokens)
            rounds += len(answer.rounds)
            self.tokens += len(answer.token_ids)
            answers.append(answer if trace else LiveAnswer(len(prompt), answer.token_ids))
        waves = rounds / min(streams, len(prompts))
        return LiveRun(answers, waves * self.round_ms(shape, streams) / 1e3)

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


PROMPTS = [[number] * 5 for number in range(24)]


def tune(server: SyntheticServer, *, exhaustive: bool = False, batches: Sequence[int] = (1, 4)):  # type: ignore[no-untyped-def]
    return search(server, PROMPTS, TuneSizes(batches, 96, LIMITS, exhaustive=exhaustive))  # type: ignore[arg-type]


@pytest.mark.parametrize("rate", [0.4, 0.8])
@pytest.mark.parametrize("node_ms", [0.002, 0.08])
def test_the_choice_is_close_to_the_exhaustive_best(rate: float, node_ms: float) -> None:
    tuned, whole = SyntheticServer(rate, node_ms), SyntheticServer(rate, node_ms)
    found, best = tune(tuned), tune(whole, exhaustive=True)
    for one, other in zip(found.batches, best.batches, strict=True):
        assert one.measured[one.best] >= 0.97 * other.measured[other.best]
    assert tuned.tokens < whole.tokens / 8
    measured = found.batches[0].measured
    assert len(measured) == 1 + FINALISTS
    assert {shape.topk == 1 for shape in measured if shape.drafts} == {True, False}


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


def test_a_draft_that_is_never_right_gets_no_shape() -> None:
    result = tune(SyntheticServer(0.0, 0.01))
    assert result.shape == NO_DRAFT
    assert [one.best for one in result.batches] == [NO_DRAFT, NO_DRAFT]
    text = profile_text(result, "target", "draft")
    assert "num_steps" not in text
    assert "did not pay" in text


def test_the_profile_has_the_shape_and_the_speeds() -> None:
    result = tune(SyntheticServer(0.8, 0.002))
    text = profile_text(result, "a\ntarget", "draft")
    assert f"num_steps = {result.shape.depth}\n" in text
    assert f"num_draft_tokens = {result.shape.max_nodes}\n" in text
    assert "# Target: a target\n" in text
    report = result_json(result)
    assert report["batches"][0]["ratios_to_plain"]["plain"] == [1.0, 1.0, 1.0]
    assert report["shape"]["topk"] == result.shape.topk
    assert len(report["accept_lengths"]) == len(candidate_shapes(LIMITS))


@pytest.mark.parametrize("check", [0, 1])
def test_the_progress_of_a_search_grows_with_its_runs_up_to_the_end(check: int) -> None:
    told: list[float] = []

    class Kept(Progress):
        def tell(self, done: float, total: float | None = None, step: str = "") -> None:
            told.append(done)

    sizes = TuneSizes((1, 4), 48, LIMITS, check=check)
    count = RunCount(Kept("tune", 1.0), sizes)

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
