"""The decision of `auto` travels from the target's engine to the gateway's JSON."""

from __future__ import annotations

from outrider.services.gateway.render import decision_object
from outrider.services.gateway.target_messages import target_stats_from_proto
from outrider.services.target.api.request_messages import decision_to_proto
from outrider.services.target.policy.verdict import AutoReason, AutoVerdict
from outrider.shared.spec.tree import DraftShape
from outrider.target.v1 import target_pb2


def shown(verdict: AutoVerdict) -> object:
    reply = target_pb2.GetStatsReply(auto=decision_to_proto(verdict, 0.5))
    decoded = target_pb2.GetStatsReply.FromString(reply.SerializeToString())
    return decision_object(target_stats_from_proto(decoded).auto)


def test_a_decision_is_shown_with_its_shapes() -> None:
    shapes = {DraftShape(3, 1, 4): 12, DraftShape(5, 8, 32): 2}
    assert shown(AutoVerdict(AutoReason.PAYS, shapes, 2, 20, 1.5, 0.0078125)) == {
        "reason": "pays",
        "shapes": [
            {"depth": 3, "topk": 1, "max_nodes": 4, "rows": 12},
            {"depth": 5, "topk": 8, "max_nodes": 32, "rows": 2},
        ],
        "plain_rows": 2,
        "batch_size": 20,
        "estimated_speedup": 1.5,
        "round_ms": 7.8125,
        "looks_lost_ms": 500.0,
    }


def test_what_is_not_known_is_null() -> None:
    found = shown(AutoVerdict())
    assert isinstance(found, dict)
    assert (found["reason"], found["estimated_speedup"], found["round_ms"]) == ("idle", None, None)


def test_an_older_target_tells_nothing() -> None:
    assert decision_object(target_stats_from_proto(target_pb2.GetStatsReply()).auto) is None
