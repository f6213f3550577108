"""Drafts that a target refuses on connection: an unfit head, another version or another algorithm."""

from __future__ import annotations

import pytest
from fake_draft import FakeDraft
from remote_rig import check_done, connected, start, truthful, wait_for

from outrider.services.target.draft_client.link import TargetIdentity
from outrider.services.target.draft_client.remote_drafter import RemoteDrafter
from outrider.shared.nn.decoder import Decoder
from outrider.shared.rpc.version import PROTOCOL_VERSION
from outrider.shared.spec.algorithm import Algorithm
from outrider.shared.spec.drafter import DrafterState


def refused_for(drafter: RemoteDrafter, field: str) -> str:
    """Wait until the target refuses its draft for a field. Return the message."""
    wait_for(lambda: drafter.refusal() is not None)
    refusal = drafter.refusal()
    assert refusal is not None
    assert refusal.field == field
    assert drafter.state() is not DrafterState.ON
    return refusal.message


def test_a_head_that_does_not_fit_is_refused(
    decoder: Decoder, drafter: RemoteDrafter, address: str, plain: list[int]
) -> None:
    fake = FakeDraft(truthful(plain), hidden_size=decoder.config.hidden_size + 1)
    server = fake.serve(address)
    try:
        refused_for(drafter, "fc.weight")
        harness = start(decoder, drafter)
        harness.run()
        check_done(harness, plain)
    finally:
        server.stop(0)


@pytest.mark.parametrize(("version", "older"), [(1, "draft"), (0, "draft"), (99, "target")])
def test_a_draft_of_another_release_is_refused_and_decoding_continues(
    decoder: Decoder, drafter: RemoteDrafter, address: str, plain: list[int], version: int, older: str
) -> None:
    fake = FakeDraft(truthful(plain), hidden_size=decoder.config.hidden_size)
    fake.ack.protocol_version = version
    server = fake.serve(address)
    try:
        message = refused_for(drafter, "protocol_version")
        assert (
            f"version {version} of the draft protocol, this target version {PROTOCOL_VERSION}: "
            f"update the {older}" in message
        )
        harness = start(decoder, drafter)
        harness.run()
        check_done(harness, plain)
        assert fake.opens == []
        fake.ack.protocol_version = PROTOCOL_VERSION  # simulates an update of the draft
        connected(drafter)
    finally:
        server.stop(0)


@pytest.mark.parametrize(
    ("asked", "said", "fits"),
    [
        ("EAGLE3", "EAGLE3", True),
        ("NEXTN", "MTP", True),
        ("auto", "NGRAM", True),
        ("EAGLE", "MTP", True),
        ("EAGLE", "EAGLE3", False),
        ("STANDALONE", "", False),
    ],
)
def test_a_draft_of_another_algorithm_is_refused(
    decoder: Decoder, address: str, plain: list[int], asked: str, said: str, fits: bool
) -> None:
    fake = FakeDraft(truthful(plain), hidden_size=decoder.config.hidden_size)
    fake.ack.algorithm = said
    server = fake.serve(address)
    identity = TargetIdentity.of(decoder, algorithm=Algorithm(asked))
    drafter = RemoteDrafter(address, identity, decoder.weight, decoder.device)
    try:
        if fits:
            connected(drafter)
            return
        message = refused_for(drafter, "speculative_algorithm")
        assert asked in message
        assert (said or "unknown kind") in message
    finally:
        drafter.shutdown()
        server.stop(0)
