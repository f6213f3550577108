"""Drafts in another process begin prompts with rows of earlier ones; the target sends only the rest."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
from support.drafts.draft_pairs import Pair, make_pair
from support.engine.target_harness import Harness, assert_same_tokens, generate_plain, make_harness
from support.suite.compute_device import DEVICE

from outrider.draft.v1 import draft_pb2
from outrider.services.draft.app import DraftService
from outrider.services.draft.serving.protocol import DraftProtocol
from outrider.services.draft.settings import DraftSettings
from outrider.services.target.draft_client.link import TargetIdentity
from outrider.services.target.draft_client.remote_drafter import RemoteDrafter
from outrider.services.target.draft_client.session import DraftSession
from outrider.services.target.draft_client.transport.grpc_carrier import GrpcCarrier
from outrider.services.target.draft_client.transport.ipc_carrier import IpcCarrier
from outrider.services.target.drafting.no_drafter import NoDrafter
from outrider.services.target.engine.loop_plan import LoopPlan
from outrider.shared.base.generation import SpeculationMode
from outrider.shared.rpc.ipc.doorbells import Side
from outrider.shared.rpc.version import Feature, VersionOffer
from outrider.shared.spec.drafter import DrafterState

torch.set_num_threads(1)
PROMPT = [random.Random(1).randrange(64) for _ in range(70)]
STORED = 64
"""Number of tokens of the full pages of `PROMPT`."""
NEW_TOKENS, SHAPE = 40, (3, 2, 8)
PATIENT_S = 16.0
SCHEMES = ["unix:", "ipc://"]
# On a GPU, this process cannot run both ends of a round: each would wait on the same stream for the other.
PLANS: dict[str, LoopPlan | None] = {"host": None}
if DEVICE.type == "cpu":
    PLANS["device"] = LoopPlan(lookahead=1, drafts_on_device=True)


@pytest.fixture(scope="module", params=["EAGLE3", "STANDALONE", "MTP", "MTP with one layer"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return make_pair(request.param, tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module")
def head_pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return make_pair("EAGLE3", tmp_path_factory.mktemp("head"))


@contextmanager
def behind(pair: Pair, folder: Path, scheme: str = "unix:") -> Iterator[tuple[RemoteDrafter, DraftService]]:
    """Serve the pair's draft on a socket, and connect a target to it."""
    settings = DraftSettings.load(
        {**pair.settings.model_dump(), "listen": f"{scheme}{folder}/draft.sock", "dtype": "float32"}
    )
    service = DraftService(settings)
    service.start()
    decoder = pair.decoder
    drafter = RemoteDrafter(
        service.address,
        TargetIdentity.of(decoder),
        decoder.weight,
        DEVICE,
        fault_deadline_s=PATIENT_S,
        on_device=True,
    )
    pause = threading.Event()
    try:
        while drafter.state() is not DrafterState.ON:
            assert drafter.refusal() is None
            pause.wait(0.005)
        yield drafter, service
    finally:
        drafter.shutdown()
        service.stop()


@contextmanager
def sent_rows() -> Iterator[list[range]]:
    """Collect the positions of the feature rows that the target sends outside of commits."""
    sent: list[range] = []
    send = GrpcCarrier.send_rows, IpcCarrier.send_rows

    def noting(which: int) -> Callable[..., None]:
        def send_rows(carrier: object, place: draft_pb2.BulkRequest, rows: torch.Tensor) -> None:
            sent.append(range(place.base, place.base + rows.shape[0]))
            send[which](carrier, place, rows)  # type: ignore[arg-type]

        return send_rows

    with (
        mock.patch.object(GrpcCarrier, "send_rows", noting(0)),
        mock.patch.object(IpcCarrier, "send_rows", noting(1)),
    ):
        yield sent


def answer(harness: Harness, name: str, prompt: list[int] = PROMPT, **options: object) -> list[range]:
    """Answer one request, and return the positions of the feature rows that were sent for its prompt."""
    with sent_rows() as sent:
        harness.submit(prompt, NEW_TOKENS, request_id=name, shape=SHAPE, ignore_eos=True, **options)  # type: ignore[arg-type]
        harness.run()
    return sent


def accept_length(harness: Harness, name: str) -> float:
    return harness.sink.finished[name].speculation.accept_length


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_second_identical_prompt_sends_few_rows_and_keeps_its_accept_length(
    pair: Pair, scheme: str, plan: str, tmp_path: Path
) -> None:
    plain = generate_plain(pair.decoder, NoDrafter(), PROMPT, NEW_TOKENS, ignore_eos=True)
    with behind(pair, tmp_path, scheme) as (drafter, _service):
        harness = make_harness(pair.decoder, drafter, plan=PLANS[plan])
        sent = {name: answer(harness, name) for name in ("first", "second")}
        answer(harness, "off", mode=SpeculationMode.OFF)
    cached = [harness.sink.finished[name].cached_tokens for name in ("first", "second", "off")]
    assert cached == [0, STORED, STORED], "speculation must not change what is found"
    for name in ("first", "second"):
        assert_same_tokens(pair.decoder, PROMPT, plain, harness.sink.tokens[name])
    assert accept_length(harness, "first") > 1
    assert accept_length(harness, "second") >= 0.99 * accept_length(harness, "first")
    rows = {name: sum(map(len, one)) for name, one in sent.items()}
    full = 0 if pair.kind == "STANDALONE" else len(PROMPT) - 1
    assert rows == {"first": full, "second": full if pair.kind == "STANDALONE" else full - STORED}


def test_chats_and_other_salts(head_pair: Pair, tmp_path: Path) -> None:
    with behind(head_pair, tmp_path) as (drafter, service):
        harness = make_harness(head_pair.decoder, drafter)
        answer(harness, "1", salt="a")
        turn = [*PROMPT, *harness.sink.tokens["1"], 7, 8, 9]
        (rest,) = answer(harness, "2", turn, salt="a")
        assert rest.start == harness.sink.finished["2"].cached_tokens == (len(turn) - 4) // 16 * 16
        assert answer(harness, "other salt", salt="b")[0].start == 0
        pause = threading.Event()
        # The draft learns of the end of the last request a little later. Pages that are never freed time out.
        while (pages := service.loop.call(service.engine.strategy.pages)).held:
            pause.wait(0.005)
        service.loop.call(service.engine.check)
        assert pages.free == pages.total, "stored pages make room"


@pytest.mark.parametrize("scheme", SCHEMES)
def test_requests_that_run_at_the_same_time_share_rows(head_pair: Pair, scheme: str, tmp_path: Path) -> None:
    plain = generate_plain(head_pair.decoder, NoDrafter(), PROMPT, NEW_TOKENS, ignore_eos=True)
    with behind(head_pair, tmp_path, scheme) as (drafter, service):
        harness = make_harness(head_pair.decoder, drafter, plan=PLANS.get("device"), prefill_chunk=30)
        for name in "abcd":
            harness.submit(PROMPT, NEW_TOKENS, request_id=name, shape=SHAPE, ignore_eos=True)
        harness.run()
        (rest,) = answer(harness, "later")
        assert rest.start == STORED
        service.loop.call(service.engine.check)
    for name in (*"abcd", "later"):
        assert_same_tokens(head_pair.decoder, PROMPT, plain, harness.sink.tokens[name])
        assert accept_length(harness, name) >= 0.99 * accept_length(harness, "a") > 1


def test_a_target_that_lacks_a_prefix_lets_the_draft_forget_it(head_pair: Pair, tmp_path: Path) -> None:
    with behind(head_pair, tmp_path) as (drafter, _service):
        harness = make_harness(head_pair.decoder, drafter)
        answer(harness, "before")
        harness.engine.flush_prefixes()
        harness.step()
        assert answer(harness, "flushed")[0].start == 0
        assert answer(harness, "again")[0].start == STORED
        assert accept_length(harness, "again") >= 0.99 * accept_length(harness, "before")


def test_a_disabled_cache_stores_nothing_at_the_draft(head_pair: Pair, tmp_path: Path) -> None:
    with behind(head_pair, tmp_path) as (drafter, service):
        harness = make_harness(head_pair.decoder, drafter, prefix_cache=False)
        for name in ("first", "second"):
            assert answer(harness, name)[0].start == 0
        assert (
            service.loop.call(lambda: len(list(service.engine.strategy._pool.allocator.store.stored_pages())))
            == 0
        )  # type: ignore[attr-defined]


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("older", Side)
def test_a_peer_of_the_last_release_gets_all_rows(
    head_pair: Pair, older: Side, scheme: str, tmp_path: Path
) -> None:
    """An older target does not send the new fields, and an older draft ignores them."""
    take, ours = DraftProtocol.take, VersionOffer.ours

    def as_before(
        self: DraftProtocol, peer: object, request: draft_pb2.SessionRequest, *rest: object
    ) -> None:
        if request.HasField("open"):
            request.open.ClearField("cache_salt")
            request.open.ClearField("stored_len")
        take(self, peer, request, *rest)  # type: ignore[arg-type]

    def offer(side: Side) -> VersionOffer:
        made = ours(side)
        return replace(made, features=made.features - {Feature.STORED_ROWS}) if side is older else made

    with (
        mock.patch.object(VersionOffer, "ours", offer),
        mock.patch.object(DraftProtocol, "take", as_before),
        behind(head_pair, tmp_path, scheme) as (drafter, _service),
    ):
        harness = make_harness(head_pair.decoder, drafter)
        for name in ("first", "second"):
            assert answer(harness, name)[0].start == 0
        assert accept_length(harness, "second") >= 0.99 * accept_length(harness, "first")


@pytest.mark.parametrize("have_len", [1 << 31, 69, 68, STORED, 7])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_wrong_number_of_stored_rows_changes_no_token(
    head_pair: Pair, have_len: int, scheme: str, tmp_path: Path
) -> None:
    opened = DraftSession.opened

    def lying(session: DraftSession, connection: object, target_id: str, _have_len: int) -> None:
        opened(session, connection, target_id, have_len)  # type: ignore[arg-type]

    plain = generate_plain(head_pair.decoder, NoDrafter(), PROMPT, NEW_TOKENS, ignore_eos=True)
    with behind(head_pair, tmp_path, scheme) as (drafter, _service):
        harness = make_harness(head_pair.decoder, drafter)
        harness.submit(PROMPT, 4, request_id="plain", mode=SpeculationMode.OFF)
        harness.run()  # The target has the prefix now, but not the draft.
        with mock.patch.object(DraftSession, "opened", lying):
            for mode in (SpeculationMode.ON, SpeculationMode.AUTO):
                answer(harness, mode.value, mode=mode, salt="")
                assert_same_tokens(head_pair.decoder, PROMPT, plain, harness.sink.tokens[mode.value])
        answer(harness, "after")
        assert_same_tokens(head_pair.decoder, PROMPT, plain, harness.sink.tokens["after"])
        assert accept_length(harness, "after") > 1, "the draft must be usable afterwards"
