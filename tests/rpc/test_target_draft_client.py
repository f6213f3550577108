"""The remote drafter against a scripted draft, over gRPC and unix sockets: protocol and failures."""

from __future__ import annotations

import time

import pytest
import torch
from fake_draft import FakeDraft
from remote_rig import FAULT_S, PROMPT, VOCAB, check_done, connected, start, truthful, wait_for
from support.engine.target_harness import make_harness

from outrider.draft.v1 import draft_pb2
from outrider.services.target.draft_client.remote_drafter import RemoteDrafter
from outrider.services.target.draft_client.transport import grpc_carrier
from outrider.shared.base.generation import SpeculationMode
from outrider.shared.nn.decoder import Decoder
from outrider.shared.spec.drafter import DrafterState

torch.set_num_threads(1)


@pytest.mark.parametrize("most_short_bytes", [grpc_carrier.MAX_SHORT_BYTES, 0], ids=["short", "long"])
def test_a_correct_draft_is_accepted(
    decoder: Decoder,
    drafter: RemoteDrafter,
    address: str,
    plain: list[int],
    most_short_bytes: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(grpc_carrier, "MAX_SHORT_BYTES", most_short_bytes)
    fake = FakeDraft(truthful(plain), hidden_size=decoder.config.hidden_size)
    server = fake.serve(address)
    try:
        connected(drafter)
        harness = start(decoder, drafter, count=3)
        held: dict[int, list[torch.Tensor]] = {}
        while harness.engine.has_work():
            harness.step()
            held |= {session_id: list(followed.rows) for session_id, followed in fake.sessions.items()}
        check_done(harness, plain, 3)
        assert fake.problems == []
        assert (fake.bulk_requests > 0) == (address.startswith("unix:") and not most_short_bytes)
        report = harness.sink.finished["0"].speculation
        assert report.accept_length > 4
        assert report.fallback_reason == ""
        assert fake.tensor_requests == 1
        assert harness.sink.rounds["0"][0].nodes[1].logprob == -0.5
        assert harness.sink.rounds["0"][0].draft_ms == 1.5
        rows = [torch.stack(rows[:50]) for rows in held.values()]
        assert torch.allclose(rows[0], rows[1], atol=1e-4)
        assert rows[0].abs().sum() > 0
        wait_for(lambda: len(fake.closed) == 3)
    finally:
        server.stop(0)


def test_without_a_draft_all_sequences_decode_plainly(
    decoder: Decoder, drafter: RemoteDrafter, plain: list[int]
) -> None:
    harness = start(decoder, drafter, count=2)
    harness.run()
    check_done(harness, plain, 2)
    assert harness.sink.finished["0"].speculation.fallback_reason == "connecting"


@pytest.mark.parametrize(
    "tree",
    [
        draft_pb2.Tree(token_ids=[1, 2], parents=[0, 2]),
        draft_pb2.Tree(token_ids=[1, 2], parents=[1, 0]),
        draft_pb2.Tree(token_ids=[VOCAB], parents=[0]),
        draft_pb2.Tree(token_ids=[(1 << 32) - 1], parents=[0]),
        draft_pb2.Tree(token_ids=[1, 2], parents=[0]),
        draft_pb2.Tree(token_ids=[1] * 5, parents=[0] * 5),
        draft_pb2.Tree(token_ids=[1] * 5, parents=range(5)),
    ],
    ids=["late-parent", "own-parent", "token", "token-32-bit", "count", "too-many", "too-deep"],
)
def test_garbage_costs_no_token_and_opens_the_breaker(
    decoder: Decoder, drafter: RemoteDrafter, address: str, plain: list[int], tree: draft_pb2.Tree
) -> None:
    def plan(tokens: list[int], commit: draft_pb2.Commit) -> draft_pb2.Tree:
        copy = draft_pb2.Tree()
        copy.CopyFrom(tree)
        return copy

    fake = FakeDraft(plan, hidden_size=decoder.config.hidden_size)
    server = fake.serve(address)
    try:
        connected(drafter)
        harness = start(decoder, drafter)
        harness.run()
        check_done(harness, plain)
        assert harness.sink.finished["0"].speculation.draft_tokens == 0
        assert "bad_tree" in harness.engine.prometheus_text()
        assert fake.asked < 20, "the open breaker stops requests"
    finally:
        server.stop(0)


def test_a_tree_of_another_fence_is_dropped(
    decoder: Decoder, drafter: RemoteDrafter, address: str, plain: list[int]
) -> None:
    good = truthful(plain)

    def plan(tokens: list[int], commit: draft_pb2.Commit) -> draft_pb2.Tree:
        commit.fence.committed_len -= 1
        return good(tokens, commit)

    fake = FakeDraft(plan, hidden_size=decoder.config.hidden_size)
    server = fake.serve(address)
    try:
        connected(drafter)
        harness = start(decoder, drafter)
        harness.run()
        check_done(harness, plain)
        assert fake.asked > 0, "the draft received a request and answered with an outdated fence"
        assert harness.sink.finished["0"].speculation.draft_tokens == 0
    finally:
        server.stop(0)


def test_a_silent_draft_costs_one_wait_and_drafting_resumes(
    decoder: Decoder, drafter: RemoteDrafter, address: str, plain: list[int]
) -> None:
    fake = FakeDraft(truthful(plain), hidden_size=decoder.config.hidden_size)
    server = fake.serve(address)
    try:
        connected(drafter)
        harness = start(decoder, drafter, max_new_tokens=200)
        for _ in range(6):
            harness.step()
        fake.silent = True
        started = time.monotonic()
        while drafter.state() is not DrafterState.DOWN:
            harness.step()
        for _ in range(4):
            harness.step()
        assert time.monotonic() - started < 2 * FAULT_S + 1
        rounds = len(harness.sink.rounds["0"])
        assert [len(one.nodes) for one in harness.sink.rounds["0"]][-3:] == [1, 1, 1]
        fake.silent = False
        for nonce in range(1, fake.pings + 1):
            fake.push(draft_pb2.SessionReply(pong=draft_pb2.Pong(nonce=nonce)))
        wait_for(lambda: drafter.state() is DrafterState.ON)
        harness.run()
        assert any(len(one.nodes) > 1 for one in harness.sink.rounds["0"][rounds:]), "drafting has resumed"
        check_done(harness, plain, max_new_tokens=200)
        assert fake.problems == []
    finally:
        server.stop(0)


def test_a_restarted_draft_resumes_running_sequences(
    decoder: Decoder, drafter: RemoteDrafter, address: str, plain: list[int]
) -> None:
    first = FakeDraft(truthful(plain), hidden_size=decoder.config.hidden_size)
    server = first.serve(address)
    connected(drafter)
    harness = start(decoder, drafter, count=2, max_new_tokens=200)
    for _ in range(8):
        harness.step()
    server.stop(0)
    for _ in range(4):
        harness.step()
    wait_for(lambda: drafter.state() is DrafterState.DOWN)
    second = FakeDraft(truthful(plain), hidden_size=decoder.config.hidden_size)
    server = second.serve(address)
    try:
        resumed_s = wait_for(lambda: drafter.state() is DrafterState.ON)
        print(f"connected {resumed_s:.2f} s after it served")
        assert resumed_s < 2.0
        rounds = len(harness.sink.rounds["0"])
        rows: list[torch.Tensor] = []
        while harness.engine.has_work():
            harness.step()
            for followed in list(second.sessions.values()):
                rows = list(followed.rows)
        assert second.problems == []
        assert all(epoch > 1 for _session, epoch in second.opens)
        assert len(second.opens) == 2
        assert any(len(one.nodes) > 1 for one in harness.sink.rounds["0"][rounds:])
        assert len(rows) > 100, "rows from position 0 were sent again"
        check_done(harness, plain, 2, 200)
    finally:
        server.stop(0)


def test_a_new_head_gets_its_own_features(
    decoder: Decoder, drafter: RemoteDrafter, address: str, plain: list[int]
) -> None:
    server = FakeDraft(truthful(plain), hidden_size=decoder.config.hidden_size, seed=1).serve(address)
    connected(drafter)
    harness = start(decoder, drafter, max_new_tokens=200)
    for _ in range(8):
        harness.step()
    server.stop(0)
    wait_for(lambda: drafter.state() is DrafterState.DOWN)
    other = FakeDraft(
        truthful(plain), hidden_size=decoder.config.hidden_size, seed=2, aux_layer_ids=(0, 2, 5)
    )
    server = other.serve(address)
    try:
        connected(drafter)
        rows: list[torch.Tensor] = []
        while harness.engine.has_work():
            harness.step()
            for followed in list(other.sessions.values()):
                rows = list(followed.rows)
        check_done(harness, plain, 1, 200)
        assert other.problems == []
        fresh = FakeDraft(truthful(plain), hidden_size=decoder.config.hidden_size, seed=2)
        assert torch.equal(fresh.projector, other.projector)
        assert len(rows) > 100
        report = harness.sink.finished["0"].speculation
        emitted = sum((k + 1) * count for k, count in enumerate(report.accepted_histogram))
        cut = sum(len(one.accepted) + 1 - len(one.emitted) for one in harness.sink.rounds["0"])
        assert emitted == 200 - 2 + cut, (
            "two prefills emitted a token each: the first, and the one that captured the new head's features"
        )
    finally:
        server.stop(0)


def test_only_the_lost_session_is_reopened(
    decoder: Decoder, drafter: RemoteDrafter, address: str, plain: list[int]
) -> None:
    fake = FakeDraft(truthful(plain), hidden_size=decoder.config.hidden_size)
    server = fake.serve(address)
    try:
        connected(drafter)
        harness = start(decoder, drafter, count=2, max_new_tokens=150)
        for _ in range(6):
            harness.step()
        lost = fake.opens[0]
        fake.push(
            draft_pb2.SessionReply(
                need_resync=draft_pb2.NeedResync(session_id=lost[0], epoch=lost[1], reason="evicted")
            )
        )
        harness.run()
        check_done(harness, plain, 2, 150)
        assert [opened for opened in fake.opens if opened[0] == lost[0]] == [lost, (lost[0], lost[1] + 1)]
        assert len(fake.opens) == 3
        assert fake.problems == []
    finally:
        server.stop(0)


def test_without_room_in_the_draft_the_sequence_decodes_plainly(
    decoder: Decoder, drafter: RemoteDrafter, address: str, plain: list[int]
) -> None:
    fake = FakeDraft(truthful(plain), hidden_size=decoder.config.hidden_size)
    server = fake.serve(address)
    try:
        connected(drafter)
        harness = start(decoder, drafter, max_new_tokens=150)
        for _ in range(4):
            harness.step()
        session_id = fake.opens[0][0]
        fake.push(
            draft_pb2.SessionReply(
                reject=draft_pb2.Reject(session_id=session_id, reason="full", retry_after_ms=60_000)
            )
        )
        harness.run()
        check_done(harness, plain, 1, 150)
        assert len(fake.opens) == 1
        assert harness.sink.finished["0"].speculation.fallback_reason == "full"
    finally:
        server.stop(0)


def test_sequences_with_mode_off_are_never_sent_to_the_draft(
    decoder: Decoder, drafter: RemoteDrafter, address: str, plain: list[int]
) -> None:
    fake = FakeDraft(truthful(plain), hidden_size=decoder.config.hidden_size)
    server = fake.serve(address)
    try:
        connected(drafter)
        harness = make_harness(decoder, drafter)
        harness.submit(PROMPT, 30, request_id="0", mode=SpeculationMode.OFF)
        harness.run()
        check_done(harness, plain, 1, 30)
        assert fake.opens == []
        assert harness.runner.pool.features is not None
        rows = harness.runner.pool.features.abs().sum(-1) > 0
        assert rows.sum() == len(PROMPT), "the features of the prompt are cached, and rounds capture none"
    finally:
        server.stop(0)
