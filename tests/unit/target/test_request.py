"""Tests the bounds of a request: violations are refused by field name, never clamped."""

from __future__ import annotations

import math

import pytest

from outrider.common.v1 import common_pb2
from outrider.services.target.api.request_messages import request_from_proto
from outrider.services.target.request import SpeculationLimits
from outrider.services.target.settings import TargetSettings
from outrider.shared.base.errors import ConfigurationError, InvalidRequestError
from outrider.shared.base.generation import SamplingParams, SpeculationMode
from outrider.shared.spec.tree import DraftShape
from outrider.target.v1 import target_pb2

LIMITS = SpeculationLimits()


@pytest.mark.parametrize(
    ("field", "value"),
    [("depth", 0), ("depth", 17), ("topk", 0), ("topk", 17), ("max_nodes", 0), ("max_nodes", 129)],
)
@pytest.mark.parametrize("mode", SpeculationMode)
def test_shapes_outside_the_caps_are_refused(mode: SpeculationMode, field: str, value: int) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        LIMITS.resolve(mode, **{field: value})  # type: ignore[arg-type]
    assert refused.value.field == f"speculation.{field}"


def test_absent_fields_take_the_servers_defaults() -> None:
    assert LIMITS.resolve().shape == DraftShape(5, 4, 16)
    assert LIMITS.resolve(depth=3).shape == DraftShape(3, 4, 16)
    assert LIMITS.resolve(max_nodes=1).shape.drafts is False
    assert LIMITS.resolve(topk=1).shape == DraftShape(5, 1, 6), "a chain has one node per level"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_p", math.nan),
        ("min_p", -0.1),
        ("min_p", 1.5),
        ("seed", -1),
        ("seed", 1 << 64),
    ],
)
def test_sampling_outside_its_range_is_refused(field: str, value: float) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        SamplingParams(**{field: value})  # type: ignore[arg-type]
    assert refused.value.field == field


def message(**fields: object) -> target_pb2.GenerateRequest:
    return target_pb2.GenerateRequest(
        **{"request_id": "a", "prompt_ids": [1, 2], "max_new_tokens": 3, **fields}
    )  # type: ignore[arg-type]


def test_a_message_without_options_is_neutral_but_for_its_seed() -> None:
    first, second = (request_from_proto(message(), LIMITS, 10) for _ in range(2))
    assert first.sampling.temperature == 1.0
    assert first.sampling.top_p == 1.0
    assert first.sampling.seed != second.sampling.seed
    assert first.speculation.mode is SpeculationMode.AUTO
    assert first.deadline is None


def test_zero_is_not_absence() -> None:
    request = request_from_proto(
        message(sampling=common_pb2.SamplingOptions(temperature=0.0, seed=0)), LIMITS, 10
    )
    assert (request.sampling.temperature, request.sampling.seed) == (0.0, 0)
    with pytest.raises(InvalidRequestError):
        request_from_proto(message(speculation=common_pb2.SpeculationOptions(max_nodes=0)), LIMITS, 10)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"request_id": ""}, "request_id"),
        ({"request_id": "x" * 300}, "request_id"),
        ({"stop_token_ids": [10]}, "stop_token_ids"),
        ({"stop_token_ids": [1] * 300}, "stop_token_ids"),
        ({"speculation": common_pb2.SpeculationOptions(mode=9)}, "speculation.mode"),  # type: ignore[arg-type]
    ],
)
def test_bad_messages_are_refused_by_name(fields: dict[str, object], field: str) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        request_from_proto(message(**fields), LIMITS, 10)
    assert refused.value.field == field


def test_settings_check_conditions_across_fields() -> None:
    settings = TargetSettings.load({"model": "m", "num_draft_tokens": 200})
    with pytest.raises(ConfigurationError) as refused:
        settings.check()
    assert refused.value.field == "num_draft_tokens"
    with pytest.raises(ConfigurationError):
        TargetSettings.load({"model": "m", "draft": "http://x"}).check()
    with pytest.raises(ConfigurationError):
        TargetSettings.load({"model": "m", "listen": "0.0.0.0:1"}).check()
    assert TargetSettings.load({"model": "m", "draft": "grpc://h:1"}).draft_address() == "h:1"
    assert TargetSettings.load({"model": "m", "draft": "unix:/a"}).draft_address() == "unix:/a"
    assert TargetSettings.load({"model": "m"}).draft_address() is None
