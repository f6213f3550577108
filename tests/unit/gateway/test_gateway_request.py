"""Sums over the sequences of one request, and the way in which replies report these sums."""

from __future__ import annotations

import json
import math

from outrider.services.gateway.generation import _by_round
from outrider.services.gateway.render import speculation_object
from outrider.services.gateway.request import Finished, TargetDelta, Usage, merge_speculation, merge_usage
from outrider.shared.base.generation import FinishReason, RoundTrace, SpeculationReport, TraceNode
from outrider.shared.obs.metrics import Metrics, join_expositions


def finished(prompt: int, completion: int) -> Finished:
    return Finished(FinishReason.STOP, None, Usage(prompt, completion, 1), SpeculationReport(), 1.0)


def one_round(emitted: tuple[int, ...]) -> RoundTrace:
    return RoundTrace(0, 5, (TraceNode(1, -1, 0, 0.0),), (), emitted, 1.0, 1.0)


def test_a_prompt_shared_by_choices_is_billed_once() -> None:
    usage = merge_usage(
        [finished(3, 10), finished(3, 20), finished(5, 1), finished(5, 2)], choices_per_prompt=2
    )
    assert usage == Usage(prompt_tokens=8, completion_tokens=33, cached_tokens=2)


def test_accept_lengths_are_weighted_by_the_rounds_that_drafted() -> None:
    # 10 rounds with draft nodes and 20 accepted; 30 rounds and 30 accepted; no rounds with draft nodes.
    first = SpeculationReport(3.0, 12, 40, 20, (0, 0, 10), "", 2.0)
    second = SpeculationReport(2.0, 30, 60, 30, (0, 30), "draft_down", None)
    third = SpeculationReport(0.0, 50, 0, 0, (50,), "user")
    merged = merge_speculation([first, second, third])
    assert math.isclose(merged.accept_length, (3.0 * 10 + 2.0 * 30) / 40)
    assert (merged.rounds, merged.draft_tokens, merged.accepted_tokens) == (92, 100, 50)
    assert merged.accepted_histogram == (50, 30, 10)
    assert (merged.fallback_reason, merged.speedup_estimate) == ("draft_down", 2.0)
    assert merge_speculation([first]) is first
    assert merge_speculation([third, third]).accept_length == 0.0


def test_a_delta_is_split_into_the_rounds_that_emitted_it() -> None:
    rounds = (one_round((3, 4)), one_round((5,)))
    assert list(_by_round(TargetDelta((1, 2)))) == [((1, 2), ())]
    assert list(_by_round(TargetDelta((3, 4, 5), rounds))) == [((3, 4), rounds[:1]), ((5,), rounds[1:])]
    # The token of the prefill belongs to no round.
    assert list(_by_round(TargetDelta((2, 3, 4, 5), rounds))) == [
        ((2,), ()),
        ((3, 4), rounds[:1]),
        ((5,), rounds[1:]),
    ]
    # A stop token cut the tokens of this round.
    assert list(_by_round(TargetDelta((3, 4), rounds))) == [((3, 4), rounds[:1]), ((), rounds[1:])]


def test_numbers_that_json_cannot_say_become_null() -> None:
    stats = SpeculationReport(accept_length=math.nan, speedup_estimate=math.inf)
    trace = [RoundTrace(0, 5, (TraceNode(1, -1, 0, -math.inf),), (), (7,), math.nan, 1.0)]
    body = json.loads(json.dumps(speculation_object(stats, trace), allow_nan=False))
    assert body["accept_length"] is None
    assert body["speedup_estimate"] is None
    assert body["fallback_reason"] is None
    assert body["trace"][0]["nodes"][0]["logprob"] is None


def test_an_exposition_is_appended_without_families_that_are_there_already() -> None:
    metrics = Metrics()
    metrics.counter("prompt_tokens", "Ours.").inc(2)
    metrics.gauge("ready", "Ours.").set(1)
    metrics.histogram("step_seconds", "Ours.", (0.1, 1.0), ["kind"]).labels("a").observe(0.5)
    theirs = (
        "# HELP outrider_ready theirs\n# TYPE outrider_ready gauge\noutrider_ready 7\n"
        "# HELP other x\n# TYPE other gauge\nother 3\n"
    )
    joined = join_expositions(metrics.render(), [({}, theirs)])
    assert "outrider_ready 1.0" in joined
    assert "outrider_ready 7" not in joined
    assert joined.endswith("# HELP other x\n# TYPE other gauge\nother 3\n")
    assert join_expositions(metrics.render(), [({}, "")]) == join_expositions(metrics.render(), [])
    assert join_expositions(metrics.render(), []) == metrics.render()


def test_the_samples_of_several_targets_are_told_apart_by_labels() -> None:
    def text(value: int) -> str:
        return (
            f"# HELP a x\n# TYPE a gauge\na {value}\n# HELP b y\n# TYPE b counter\n"
            f'b_total{{reason="c d"}} {value}\nb_total{{}} 0\n'
        )

    others = [({"model": "m", "target": name}, text(at)) for at, name in enumerate(("t", 'u"\\'))]
    assert join_expositions("", others).splitlines() == [
        "# HELP a x",
        "# TYPE a gauge",
        'a{model="m",target="t"} 0',
        'a{model="m",target="u\\"\\\\"} 1',
        "# HELP b y",
        "# TYPE b counter",
        'b_total{model="m",target="t",reason="c d"} 0',
        'b_total{model="m",target="t"} 0',
        'b_total{model="m",target="u\\"\\\\",reason="c d"} 1',
        'b_total{model="m",target="u\\"\\\\"} 0',
    ]
