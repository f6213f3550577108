"""SGLang's routes for the load of a server, as its routers read them."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from typing import Any

import pytest
from fake_target import FakeTarget
from gateway_thread import GatewayThread
from http_calls import MakeGateway, client_of, error_of
from target_calls import wait_all
from tokenizers import Tokenizer

from outrider.common.v1 import common_pb2
from outrider.target.v1 import target_pb2

LOAD = {
    "dp_rank": 0,
    "num_running_reqs": 4,
    "num_waiting_reqs": 2,
    "num_total_reqs": 6,
    "num_used_tokens": 25 * 16,
    "num_total_tokens": 25 * 16 + 70,
    "max_total_num_tokens": 100 * 16,
    "token_usage": 0.25,
    "gen_throughput": 0.0,
    "cache_hit_rate": 0.75,
    "utilization": 0.25,
    "max_running_requests": 16,
}
MEMORY = {"weight_gb": 1.0, "kv_cache_gb": 0.5, "graph_gb": 0.25, "token_capacity": 1600}
SPECULATIVE = {"accept_length": 2.5, "accept_rate": 0.5}


class BusyTarget(FakeTarget):
    """A target with a load."""

    def GetStats(self, request: Any, context: Any) -> target_pb2.GetStatsReply:
        return target_pb2.GetStatsReply(
            running=4,
            waiting=2,
            waiting_prompt_tokens=70,
            pages_total=100,
            pages_free=75,
            pages_held=25,
            draft_state="on",
            speculation=common_pb2.SpeculationStats(
                accept_length=2.5, rounds=10, draft_tokens=30, accepted_tokens=15
            ),
            prefix_cache=target_pb2.PrefixCacheStats(enabled=True, queried_tokens=400, hit_tokens=300),
            resources=target_pb2.ResourceStats(weight_bytes=2**30, kv_bytes=2**29, graph_bytes=2**28),
        )


@pytest.fixture(scope="module")
def busy(tokenizer: Tokenizer) -> Iterator[list[FakeTarget]]:
    targets = [BusyTarget(tokenizer.get_vocab_size()) for _ in range(2)]
    for target in targets:
        target.start()
    yield targets
    for target in targets:
        target.stop()


def of_targets(make_gateway: MakeGateway, targets: list[FakeTarget]) -> GatewayThread:
    gateway = make_gateway(target=[one.address for one in targets])
    wait_all(gateway, len(targets))
    return gateway


def test_loads_has_all_sections_of_a_target(make_gateway: MakeGateway, busy: list[FakeTarget]) -> None:
    with client_of(of_targets(make_gateway, busy[:1])) as http:
        reply = http.get("/v1/loads").json()
        assert datetime.fromisoformat(reply["timestamp"]).tzinfo is not None
        assert reply["version"] == http.get("/version").json()["version"]
        assert (reply["num_accelerators"], reply["dp_rank_count"]) == (2, 1)
        assert reply["loads"] == [{**LOAD, "memory": MEMORY, "speculative": SPECULATIVE}]
        assert reply["aggregate"] == {
            "total_running_reqs": 4,
            "total_waiting_reqs": 2,
            "total_reqs": 6,
            "total_used_tokens": 400,
            "total_tokens": 470,
            "avg_token_usage": 0.25,
            "avg_throughput": 0.0,
            "avg_utilization": 0.25,
        }


@pytest.mark.parametrize(
    ("include", "more"),
    [
        ("core", {}),
        ("core, memory", {"memory": MEMORY}),
        ("spec", {"speculative": SPECULATIVE}),
        ("queues,lora,disagg", {}),
        ("all", {"memory": MEMORY, "speculative": SPECULATIVE}),
    ],
)
def test_include_names_the_sections(
    make_gateway: MakeGateway, busy: list[FakeTarget], include: str, more: dict[str, Any]
) -> None:
    with client_of(of_targets(make_gateway, busy[:1])) as http:
        found = http.get("/v1/loads", params={"include": include}).json()
        assert found["loads"] == [{**LOAD, **more}]


def test_each_target_is_a_rank(make_gateway: MakeGateway, busy: list[FakeTarget]) -> None:
    with client_of(of_targets(make_gateway, busy)) as http:
        both = http.get("/v1/loads").json()
        assert [one["dp_rank"] for one in both["loads"]] == [0, 1]
        assert (both["dp_rank_count"], both["aggregate"]["total_reqs"]) == (2, 12)
        assert both["aggregate"]["avg_token_usage"] == 0.25
        one = http.get("/v1/loads", params={"dp_rank": 1}).json()
        assert [load["dp_rank"] for load in one["loads"]] == [1]
        assert http.get("/v1/loads", params={"dp_rank": 7}).json()["loads"] == []


def test_loads_as_prometheus_text(make_gateway: MakeGateway, busy: list[FakeTarget]) -> None:
    with client_of(of_targets(make_gateway, busy)) as http:
        response = http.get("/v1/loads", params={"format": "prometheus"})
        assert response.headers["content-type"].startswith("text/plain")
        lines = response.text.splitlines()
        assert lines.count("# TYPE sglang_num_running_reqs gauge") == 1
        assert 'sglang_num_running_reqs{dp_rank="0"} 4' in lines
        assert 'sglang_num_running_reqs{dp_rank="1"} 4' in lines
        assert 'sglang_spec_accept_length{dp_rank="1"} 2.5' in lines
        assert 'sglang_memory_weight_gb{dp_rank="0"} 1.0' in lines


def test_get_load_has_the_older_form(make_gateway: MakeGateway, busy: list[FakeTarget]) -> None:
    with client_of(of_targets(make_gateway, busy[:1])) as http:
        [found] = http.get("/get_load").json()
        assert found.pop("ts_tic") > 0
        assert found == {
            "dp_rank": 0,
            "num_reqs": 6,
            "num_waiting_reqs": 2,
            "num_tokens": 470,
            "num_pending_tokens": 70,
        }


@pytest.mark.parametrize("query", [{"include": "core,nope"}, {"format": "xml"}, {"dp_rank": "first"}])
def test_wrong_parameters_are_named(gateway: GatewayThread, query: dict[str, str]) -> None:
    with client_of(gateway) as http:
        response = http.get("/v1/loads", params=query)
        assert (response.status_code, error_of(response)["param"]) == (400, next(iter(query)))


def test_a_server_without_a_target_is_not_ready(make_gateway: MakeGateway, tokenizer: Tokenizer) -> None:
    with client_of(make_gateway(target="127.0.0.1:1", ready=False)) as http:
        for path in ("/v1/loads", "/get_load"):
            assert http.get(path).status_code == 503
