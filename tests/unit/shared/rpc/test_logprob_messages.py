"""Rules and logprobs survive the way over the wire."""

from __future__ import annotations

import pytest

from outrider.common.v1 import common_pb2
from outrider.shared.base.errors import InvalidRequestError
from outrider.shared.base.logit_rules import NO_LOGPROBS, NO_RULES, LogitRules, LogprobParams, TokenLogprob
from outrider.shared.rpc.logprob_messages import (
    logprob_from_proto,
    logprobs_from_proto,
    logprobs_to_proto,
    rules_from_proto,
    set_rules,
    write_logprob,
)
from outrider.target.v1 import target_pb2


@pytest.mark.parametrize(
    "rules",
    [
        NO_RULES,
        LogitRules(repetition_penalty=1.5),
        LogitRules(-0.5, 0.25, 1.5, ((3, -1.0), (7, 2.0)), 4, (1, 2, 3), ((1,), (2, 3))),
    ],
)
def test_rules(rules: LogitRules) -> None:
    options = common_pb2.SamplingOptions()
    set_rules(options, rules)
    assert rules_from_proto(options) == rules


def test_rules_out_of_range_are_refused() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        rules_from_proto(common_pb2.SamplingOptions(frequency_penalty=3.0))
    assert caught.value.field == "frequency_penalty"
    with pytest.raises(InvalidRequestError):
        rules_from_proto(common_pb2.SamplingOptions(bad_words=[common_pb2.TokenSequence()]))


def test_wanted_logprobs() -> None:
    assert logprobs_to_proto(NO_LOGPROBS) is None
    assert logprobs_from_proto(common_pb2.LogprobOptions()) == NO_LOGPROBS
    for wanted in (LogprobParams(0), LogprobParams(5, 2, 7), LogprobParams(None, 0)):
        message = logprobs_to_proto(wanted)
        assert message is not None
        assert logprobs_from_proto(message) == wanted
    with pytest.raises(InvalidRequestError):
        logprobs_from_proto(common_pb2.LogprobOptions(top=21))


def test_logprobs() -> None:
    delta = target_pb2.TokenDelta()
    found = [TokenLogprob(-0.5, [], [], []), TokenLogprob(-2.0, [4, 1], [-0.25, -1.5], [-3.0])]
    for one in found:
        write_logprob(one, delta.logprobs.add())
    assert [logprob_from_proto(one) for one in delta.logprobs] == found
    assert found[1].top == [(4, -0.25), (1, -1.5)]
