"""How target and draft agree on a version and features of their protocol, over gRPC and ipc."""

from __future__ import annotations

import contextlib
import logging
import re
import threading
from collections.abc import Iterator

import pytest
import torch
from fake_draft import FakeDraft
from remote_rig import VOCAB, check_done, connected, refused_for, start, truthful, wait_for
from structlog.testing import capture_logs
from support.models.toys import make_toy_eagle3, make_toy_target

from outrider.draft.v1 import draft_pb2, draft_pb2_grpc
from outrider.services.draft.app import DraftService
from outrider.services.draft.settings import DraftSettings
from outrider.services.target.draft_client.remote_drafter import RemoteDrafter
from outrider.services.target.draft_client.transport.carrier import Carrier, ConnectionLost
from outrider.services.target.draft_client.transport.create import carrier_of
from outrider.shared.base.errors import OutriderError, ProtocolError
from outrider.shared.nn.decoder import Decoder
from outrider.shared.rpc import version
from outrider.shared.rpc.address import grpc_address
from outrider.shared.rpc.client import open_channel
from outrider.shared.rpc.version import FEATURES, MAX_VERSION, Feature, VersionOffer, agree

HIDDEN, LAYERS = 64, 8
CPU = torch.device("cpu")
ROUNDS, MAILBOX = draft_pb2.PROTOCOL_FEATURE_ROUNDS_ON_DEVICE, draft_pb2.PROTOCOL_FEATURE_MAILBOX
SLOTTED = draft_pb2.PROTOCOL_FEATURE_SLOTTED_ROUNDS
UNKNOWN = 1000
"""A feature of a later release."""

OLD = "features: mailbox, trace_logprobs"
"""The features in force with a release that sends no range."""
TOGETHER: list[tuple[dict[str, object], int, str]] = [
    ({"protocol_version": 2}, 2, OLD),
    ({"protocol_version": 2, "min_version": 2, "max_version": 2}, 2, "features: none"),
    (
        {"protocol_version": 1, "min_version": 1, "max_version": 9, "protocol_features": [MAILBOX, UNKNOWN]},
        3,
        "features: mailbox",
    ),
    (
        {"protocol_version": 3, "min_version": 3, "max_version": 4, "protocol_features": [SLOTTED, ROUNDS]},
        3,
        "features: slotted_rounds",
    ),
]
"""What a peer sends, the version on which it and a release of versions 2 to 3 agree, and the features."""

APART: list[tuple[dict[str, object], str, str]] = [
    (
        {"protocol_version": 1},
        "protocol_version",
        "The {peer} supports version 1 of the draft protocol, this {here} versions 2 to 3. The {peer} is "
        "older: update it to a release that supports version 2.",
    ),
    (
        {"protocol_version": 4, "min_version": 4, "max_version": 7},
        "protocol_version",
        "The {peer} supports versions 4 to 7 of the draft protocol, this {here} versions 2 to 3. The {here} "
        "is older: update it to a release that supports version 4.",
    ),
    ({}, "protocol_version", "The {peer} sent no version of the draft protocol: update the {peer}."),
    (
        {"protocol_version": 2, "min_version": 3, "max_version": 2},
        "min_version",
        "The {peer} sent min_version 3 and max_version 2: min_version must be at least 1 and at most",
    ),
    (
        {"protocol_version": 2, "max_version": 2**32 - 1},
        "min_version",
        "The {peer} sent min_version 0 and max_version 4294967295: ",
    ),
    (
        {"protocol_version": 4, "min_version": 2, "max_version": 3},
        "protocol_version",
        "The {peer} sent protocol_version 4, which is not one of its versions (2 to 3): update the {peer}.",
    ),
]
"""What a peer sends that a release of versions 2 to 3 refuses, the field, and the message."""


@pytest.fixture
def versions_2_to_3(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep these tests as they are when this release supports further versions."""
    monkeypatch.setattr(version, "MIN_VERSION", 2)
    monkeypatch.setattr(version, "MAX_VERSION", 3)


# ---- a target and the draft service


@pytest.fixture(scope="module", params=["unix:", "ipc://"])
def service(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[DraftService]:
    folder = tmp_path_factory.mktemp("service")
    target = make_toy_target(folder / "target")
    values = {
        "draft": make_toy_eagle3(folder / "head", target),
        "target_weights": target,
        "listen": f"{request.param}{folder}/draft.sock",
        "device": "cpu",
    }
    running = DraftService(DraftSettings.load(values))
    running.start()
    yield running
    running.stop()


@pytest.fixture
def carrier(service: DraftService) -> Iterator[Carrier]:
    carrier = carrier_of(service.address, CPU, on_device=True)()
    yield carrier
    carrier.close()
    carrier.release()


def hello_of(fields: dict[str, object]) -> draft_pb2.Hello:
    sizes = {"vocab_size": VOCAB, "hidden_size": HIDDEN, "num_layers": LAYERS}
    return draft_pb2.Hello(target_id="t1", **(sizes | fields))  # type: ignore[arg-type]


def follow(carrier: Carrier) -> None:
    with contextlib.suppress(ConnectionLost):
        carrier.follow(lambda _pong: None)


@pytest.mark.usefixtures("versions_2_to_3")
@pytest.mark.parametrize(("fields", "chosen", "features"), TOGETHER)
def test_the_draft_chooses_the_highest_common_version(
    carrier: Carrier, fields: dict[str, object], chosen: int, features: str
) -> None:
    with capture_logs() as logs:
        ack = carrier.hello(hello_of(fields))
    assert (ack.protocol_version, ack.min_version, ack.max_version) == (chosen, 2, 3)
    assert set(ack.protocol_features) == FEATURES
    (joined,) = (line for line in logs if line["event"] == "target joined")
    assert joined["protocol"] == f"version {chosen}, {features}"


@pytest.mark.usefixtures("versions_2_to_3")
@pytest.mark.parametrize(("fields", "field", "complaint"), APART)
def test_the_draft_refuses_a_target_without_a_common_version(
    carrier: Carrier, fields: dict[str, object], field: str, complaint: str
) -> None:
    with pytest.raises(
        OutriderError, match=re.escape(complaint.format(peer="target", here="draft"))
    ) as error:
        carrier.hello(hello_of(fields))
    assert error.value.field == field


def test_get_info_describes_what_the_draft_supports(service: DraftService) -> None:
    with open_channel(grpc_address(service.address, "address")) as channel:
        head = draft_pb2_grpc.DraftStub(channel).GetInfo(draft_pb2.GetInfoRequest()).head
    assert (head.protocol_version, head.min_version, head.max_version) == (MAX_VERSION, 2, MAX_VERSION)
    assert set(head.protocol_features) == FEATURES


@pytest.mark.parametrize(
    "offered",
    [
        {"protocol_version": 2},
        {"protocol_version": 2, "min_version": 2, "max_version": 2, "protocol_features": [ROUNDS, MAILBOX]},
        {"protocol_version": 2, "min_version": 2, "max_version": 3, "protocol_features": [SLOTTED, MAILBOX]},
    ],
    ids=["without a range", "version 2", "version 3"],
)
def test_rounds_are_offered_only_to_peers_with_slots(carrier: Carrier, offered: dict[str, object]) -> None:
    ack = carrier.hello(hello_of(offered))
    common = agree(VersionOffer.of(hello_of(offered)), VersionOffer.of(ack))
    carrier.open_bulk("t1", common.features)
    assert (carrier.exchange is not None) == (common.version == 3)


def test_a_target_of_version_2_is_told_that_its_rounds_run_through_the_host(carrier: Carrier) -> None:
    carrier.hello(hello_of({"protocol_version": 2}))
    carrier.open_bulk("t1", frozenset({Feature.MAILBOX}))
    threading.Thread(target=follow, args=(carrier,), daemon=True).start()
    carrier.send(draft_pb2.SessionRequest(rounds_enter=draft_pb2.RoundsEnter(rounds=5)))
    carrier.send(draft_pb2.SessionRequest(rounds_leave=draft_pb2.RoundsLeave(rounds=5)))
    reply = carrier.receive(30.0)
    assert reply is not None
    assert (reply.rounds_entered.rounds, reply.rounds_entered.accepted) == (5, False)


def test_ipc_without_mailboxes_is_refused_and_grpc_is_not(service: DraftService, carrier: Carrier) -> None:
    carrier.hello(hello_of({"protocol_version": 2}))
    features = FEATURES - {Feature.MAILBOX}
    if service.address.startswith("ipc:"):
        with pytest.raises(ProtocolError, match="use a draft address for gRPC"):
            carrier.open_bulk("t1", features)
    else:
        carrier.open_bulk("t1", features)


# ---- the target and a scripted draft


def fake_draft(decoder: Decoder, plain: list[int], fields: dict[str, object]) -> FakeDraft:
    """Return a draft whose HelloAck contains only these fields of the protocol's version."""
    fake = FakeDraft(truthful(plain), hidden_size=decoder.config.hidden_size)
    for field in ("protocol_version", "min_version", "max_version", "protocol_features"):
        fake.ack.ClearField(field)  # type: ignore[arg-type]
    fake.ack.MergeFrom(draft_pb2.HelloAck(**fields))  # type: ignore[arg-type]
    return fake


@pytest.mark.usefixtures("versions_2_to_3")
@pytest.mark.parametrize(("fields", "chosen", "features"), TOGETHER)
def test_the_target_agrees_with_the_draft(
    decoder: Decoder,
    drafter: RemoteDrafter,
    address: str,
    plain: list[int],
    caplog: pytest.LogCaptureFixture,
    fields: dict[str, object],
    chosen: int,
    features: str,
) -> None:
    caplog.set_level(logging.INFO, "outrider.target.draft")
    fake = fake_draft(decoder, plain, fields | {"protocol_version": chosen})
    server = fake.serve(address)
    try:
        if address.startswith("ipc:") and "mailbox" not in features:
            assert "mailboxes" in refused_for(drafter, "protocol_features")
            return
        line = f"connected to the draft at {address} with protocol version {chosen}, {features}"
        wait_for(lambda: line in caplog.messages)
    finally:
        server.stop(0)
    hello = fake.hellos[0]
    # An old draft reads only protocol_version, and accepts only the version that it knows.
    assert (hello.protocol_version, hello.min_version, hello.max_version) == (2, 2, 3)
    assert set(hello.protocol_features) == FEATURES


@pytest.mark.usefixtures("versions_2_to_3")
@pytest.mark.parametrize(
    ("fields", "field", "complaint"),
    [
        *APART,
        (
            {"protocol_version": 2, "min_version": 1, "max_version": 9},
            "protocol_version",
            "The draft chose version 2 of the draft protocol, but both sides support version 3: update the",
        ),
    ],
)
def test_the_target_refuses_a_draft_without_a_common_version_and_decodes_plainly(
    decoder: Decoder,
    drafter: RemoteDrafter,
    address: str,
    plain: list[int],
    fields: dict[str, object],
    field: str,
    complaint: str,
) -> None:
    fake = fake_draft(decoder, plain, fields)
    server = fake.serve(address)
    try:
        assert complaint.format(peer="draft", here="target") in refused_for(drafter, field)
        harness = start(decoder, drafter)
        harness.run()
        check_done(harness, plain)
        assert fake.opens == []
    finally:
        server.stop(0)


def test_the_target_uses_a_refused_draft_after_its_update(
    decoder: Decoder, drafter: RemoteDrafter, address: str, plain: list[int]
) -> None:
    fake = fake_draft(decoder, plain, {"protocol_version": 1})
    server = fake.serve(address)
    try:
        refused_for(drafter, "protocol_version")
        fake.ack.protocol_version = 2
        connected(drafter)
        harness = start(decoder, drafter)
        harness.run()
        check_done(harness, plain)
        assert fake.opens
    finally:
        server.stop(0)
