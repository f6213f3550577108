"""Services of this release work with services of the previous one, in both directions.

No wheel of a release is published yet. A proxy takes the place of the older side, whether this is the caller
or the service: it passes only the fields, versions and features of the previous release.
`tests/packaging/test_earlier_wheel.py` runs the services of a real earlier wheel.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from google.protobuf import descriptor_pb2
from support.connection.released_proxy import ReleasedProxy
from support.connection.released_wire import DRAFT_VERSIONS, as_released, released_files
from support.engine.target_harness import assert_same_tokens, generate_plain, load_toy, make_harness
from support.models.toys import make_toy_target
from test_drafter_strategies import connect, serving
from test_target_service import TIMEOUT_S, Service

from outrider.common.v1 import common_pb2
from outrider.draft.v1 import draft_pb2
from outrider.gateway.v1 import gateway_pb2
from outrider.services.gateway.request import (
    GenerationRequest,
    RequestedSpeculation,
    StopRules,
    TargetDelta,
)
from outrider.services.gateway.target_client.pool import PoolLimits, TargetPool
from outrider.services.gateway.target_client.stream import ReaderLimits
from outrider.services.gateway.target_sources import TargetSource
from outrider.services.target.drafting.no_drafter import NoDrafter
from outrider.services.target.settings import TargetSettings
from outrider.shared.base.errors import ProtocolError
from outrider.shared.base.generation import SamplingParams
from outrider.shared.base.logit_rules import LogprobParams
from outrider.shared.rpc import version
from outrider.shared.rpc.target_version import TargetFeature, agree_with_target
from outrider.target.v1 import target_pb2

VOCAB = 40
PROMPT = (5, 9, 2, 33, 7)
SAMPLING = SamplingParams(temperature=1.0, seed=3)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_toy_target(tmp_path_factory.mktemp("target"), vocab_size=VOCAB, num_layers=1, seed=3)


@pytest.fixture(scope="module")
def service(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    listen = f"unix:{tmp_path_factory.mktemp('s')}/t.sock"
    running = Service(
        TargetSettings.load({"model": model, "listen": listen, "threads": 1, "kv_tokens": 2048})
    )
    yield running
    running.stop()


async def generate(address: str, resume_ids: Sequence[int] = ()) -> tuple[list[int], list[float], bool]:
    """Return the tokens and logprobs that a gateway gets, and whether it could continue answers there."""
    pool = TargetPool([TargetSource(address)], PoolLimits(ReaderLimits(65536, 30)))
    await pool.start()
    await pool.readiness.wait_for(True)
    try:
        request = GenerationRequest(
            "r",
            PROMPT,
            12,
            SAMPLING,
            RequestedSpeculation(),
            StopRules(ignore_eos=True),
            asyncio.get_running_loop().time() + 30,
            logprobs=LogprobParams(top=1),
            resume_ids=tuple(resume_ids),
        )
        resumes = pool.info(None).resumes
        tokens: list[int] = []
        logprobs: list[float] = []
        stream = pool.submit(request, None)
        while isinstance(event := await stream.next(), TargetDelta):
            tokens += event.token_ids
            logprobs += [one.logprob for one in event.logprobs]
        stream.close()
        assert event.usage.completion_tokens == 12
        return tokens, logprobs, resumes
    finally:
        await pool.close()


def test_gateway_and_target_of_two_releases_work_together(service: Service, tmp_path: Path) -> None:
    def run(address: str, resume_ids: Sequence[int] = ()) -> tuple[list[int], list[float], bool]:
        # grpc.aio is made for one event loop in a process, so both sides share that of the target's server.
        return asyncio.run_coroutine_threadsafe(generate(address, resume_ids), service._loop).result(
            TIMEOUT_S
        )

    tokens, logprobs, resumes = run(service.address)
    assert resumes
    proxy = ReleasedProxy(f"unix:{tmp_path}/p.sock", service.address)
    try:
        assert run(proxy.address) == (tokens, logprobs, False)
    finally:
        proxy.close()
    rest = run(service.address, tokens[:5])
    assert rest[0] == tokens[5:]
    assert rest[1] == pytest.approx(logprobs[5:], abs=1e-4)


def test_target_and_draft_of_two_releases_work_together(model: Path, tmp_path: Path) -> None:
    assert DRAFT_VERSIONS[1] >= version.MIN_VERSION, "this release supports no version of the previous one"
    target = load_toy(model)
    with serving(tmp_path, draft=model, speculative_algorithm="STANDALONE", target_weights=model) as draft:
        proxy = ReleasedProxy(f"unix:{tmp_path}/p.sock", draft.address)
        drafter = connect(proxy, target)  # type: ignore[arg-type]  # only its address is used
        harness = make_harness(target, drafter, prefill_chunk=8)
        harness.submit(PROMPT, 24, request_id="r", sampling=SAMPLING, shape=(3, 2, 11))
        harness.run()
        drafter.shutdown()
        proxy.close()
    plain = generate_plain(target, NoDrafter(), PROMPT, 24, sampling=SAMPLING)
    assert_same_tokens(target, PROMPT, plain, harness.sink.tokens["r"], SAMPLING)
    assert harness.sink.finished["r"].speculation.accepted_tokens > 0


def test_no_field_of_the_previous_release_has_changed_its_meaning() -> None:
    """A field keeps its number, name and type, or its number is never used again."""
    ours = {}
    for module in (common_pb2, draft_pb2, gateway_pb2, target_pb2):
        file = descriptor_pb2.FileDescriptorProto()
        module.DESCRIPTOR.CopyToProto(file)
        ours[file.name] = file
    for old in released_files().file:
        new = ours[old.name]
        messages = {one.name: one for one in new.message_type}
        for message in old.message_type:
            check_fields(message, messages[message.name])
        enums = {one.name: {(value.number, value.name) for value in one.value} for one in new.enum_type}
        for enum in old.enum_type:
            assert {(value.number, value.name) for value in enum.value} <= enums[enum.name], enum.name
        methods = {(one.name, str(method)) for one in new.service for method in one.method}
        assert {(one.name, str(method)) for one in old.service for method in one.method} <= methods


def check_fields(old: descriptor_pb2.DescriptorProto, new: descriptor_pb2.DescriptorProto) -> None:
    fields = {one.number: one for one in new.field}
    reserved = {number for one in new.reserved_range for number in range(one.start, one.end)}
    for field in old.field:
        name = f"{old.name}.{field.name}"
        if field.number not in fields:
            assert field.number in reserved, f"{name} was removed: reserve its number {field.number}"
            continue
        found = fields[field.number]
        for part in ("name", "type", "type_name", "label"):
            assert getattr(found, part) == getattr(field, part), f"{name} has another {part}"
    for nested in old.nested_type:
        check_fields(nested, next(one for one in new.nested_type if one.name == nested.name))


def test_the_older_side_knows_no_new_field() -> None:
    """The proxy would prove nothing if it passed everything."""
    request = target_pb2.GenerateRequest(request_id="r", prompt_ids=[1], resume_ids=[2])
    name = "outrider.target.v1.GenerateRequest"
    passed = target_pb2.GenerateRequest.FromString(as_released(request.SerializeToString(), name))
    assert passed == target_pb2.GenerateRequest(request_id="r", prompt_ids=[1])


@pytest.mark.parametrize(
    ("lowest", "highest", "features", "found"),
    [
        (0, 0, [], set()),
        (1, 1, [1, 99], {TargetFeature.RESUME}),
        (1, 5, [99], set()),
    ],
)
def test_a_gateway_uses_what_both_sides_support(
    lowest: int, highest: int, features: list[int], found: set[TargetFeature]
) -> None:
    reply = target_pb2.GetInfoReply(min_version=lowest, max_version=highest)
    reply.features.extend(features)  # type: ignore[arg-type]
    assert agree_with_target(target_pb2.GetInfoReply.FromString(reply.SerializeToString())) == found


def test_a_gateway_names_a_target_that_is_too_new() -> None:
    with pytest.raises(ProtocolError, match=r"versions 2 to 3 .* this gateway 1 to 1. The gateway is older"):
        agree_with_target(target_pb2.GetInfoReply(min_version=2, max_version=3))
