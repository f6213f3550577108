"""Drafts that a target refuses on connection: an unfit head or another algorithm."""

from __future__ import annotations

import pytest
from fake_draft import FakeDraft
from remote_rig import check_done, connected, refused_for, start, truthful

from outrider.services.target.draft_client.link import TargetIdentity
from outrider.services.target.draft_client.remote_drafter import RemoteDrafter
from outrider.shared.nn.decoder import Decoder
from outrider.shared.spec.algorithm import Algorithm


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
