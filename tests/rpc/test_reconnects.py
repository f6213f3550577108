"""Drafts that connect and disconnect leave nothing in the target: no descriptor, thread or mapped memory."""

from __future__ import annotations

import gc
import os
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from support.engine.target_harness import Harness, load_toy, make_harness
from support.models.toys import make_toy_pair

from outrider.services.draft.app import DraftService
from outrider.services.draft.peers import stream_exchange as draft_end
from outrider.services.draft.settings import DraftSettings
from outrider.services.target.draft_client.link import TargetIdentity
from outrider.services.target.draft_client.remote_drafter import RemoteDrafter
from outrider.services.target.draft_client.transport import stream_exchange as target_end
from outrider.services.target.engine.loop_plan import LoopPlan
from outrider.shared.nn.decoder import Decoder
from outrider.shared.spec.drafter import DrafterState

torch.set_num_threads(1)
VOCAB = 64
LIVES = 10
PROMPT = [1, 2, 3, 4]
TIMEOUT_S = 20.0
Held = tuple[int, int, int]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return make_toy_pair(tmp_path_factory.mktemp("pair"), VOCAB, vocab_size=VOCAB)


@pytest.fixture(scope="module")
def decoder(folders: tuple[Path, Path]) -> Decoder:
    return load_toy(folders[0])


@pytest.fixture
def uncollected() -> Iterator[None]:
    """Disable the garbage collector.

    It may not run for a long time, and on a GPU each connection keeps 100 MB.
    """
    gc.collect()
    gc.disable()
    yield
    gc.enable()


class Life:
    """A draft from its start to its end."""

    def __init__(self, address: str, folders: tuple[Path, Path]) -> None:
        values = {
            "draft": folders[1],
            "target_weights": folders[0],
            "listen": address,
            "device": "cpu",
            "kv_tokens": 2048,
            "drain_grace_s": 0.1,
        }
        self.service = DraftService(DraftSettings.load(values))
        self.service.start()

    def end(self) -> None:
        """Simulate a kill: close the sockets without notice."""
        ipc = self.service._ipc
        for frames in list(ipc._sockets) if ipc else ():
            frames.close()
        self.service.stop()


def generate(decoder: Decoder, drafter: RemoteDrafter) -> int:
    """Return the number of steps of a request whose rounds ran on the device."""
    harness: Harness = make_harness(decoder, drafter, plan=LoopPlan(lookahead=1, drafts_on_device=True))
    harness.submit(PROMPT, 30, request_id="a", shape=(3, 1, 4))
    steps = 0
    while harness.engine.has_work():
        harness.step()
        steps += harness.engine.on_device
    harness.check_idle()
    return steps


def held() -> Held:
    """Return the numbers of mapped mailboxes, open descriptors and threads."""
    mapped = sum("outrider-mailbox" in line for line in Path("/proc/self/maps").read_text().splitlines())
    return mapped, len(os.listdir("/proc/self/fd")), threading.active_count()


def connected(drafter: RemoteDrafter) -> None:
    assert wait_for(lambda: drafter.state() is DrafterState.ON)


def wait_for(condition: Callable[[], bool]) -> bool:
    pause = threading.Event()
    for _ in range(int(TIMEOUT_S / 0.01)):
        if condition():
            return True
        pause.wait(0.01)
    return False


@pytest.mark.usefixtures("uncollected")
def test_drafts_that_come_and_go_leak_nothing(
    decoder: Decoder, folders: tuple[Path, Path], tmp_path: Path
) -> None:
    """Ten drafts are used; ten come while there is no request, so that the engine does not notice them."""
    address = f"ipc://{tmp_path}/draft.sock"
    identity = TargetIdentity.of(decoder)
    drafter = RemoteDrafter(
        address, identity, decoder.weight, torch.device("cpu"), fault_deadline_s=TIMEOUT_S, on_device=True
    )

    def live(*, used: bool) -> None:
        draft = Life(address, folders)
        assert wait_for(lambda: drafter.state() is DrafterState.ON)
        if used:
            assert generate(decoder, drafter) > 5
        draft.end()
        assert wait_for(lambda: drafter.state() is DrafterState.DOWN)

    try:
        live(used=True)  # allocates everything that is made once and kept
        usual = held()
        for _ in range(LIVES):
            live(used=False)
        for _ in range(LIVES):
            live(used=True)
        # Allow some slack: an ending server may keep some a moment longer, and one draft's may remain.
        # A leak would keep every draft's.
        most = tuple(number + LIVES // 2 for number in usual)
        assert wait_for(lambda: all(now <= bound for now, bound in zip(held(), most, strict=True))), (
            usual,
            held(),
        )
    finally:
        drafter.shutdown()


@pytest.mark.usefixtures("uncollected")
def test_over_grpc_neither_side_keeps_rounds_of_ended_connections(
    decoder: Decoder, folders: tuple[Path, Path], tmp_path: Path
) -> None:
    """With a GPU, these objects own memory that streams can access."""

    def there_are() -> Counter[str]:
        ends = {draft_end.StreamExchange: "draft", target_end.StreamExchange: "target"}
        return Counter(ends[type(one)] for one in gc.get_objects() if type(one) in ends)

    address = f"unix:{tmp_path}/draft.sock"
    draft = Life(address, folders)
    drafter = RemoteDrafter(
        address, TargetIdentity.of(decoder), decoder.weight, torch.device("cpu"), on_device=True
    )
    try:
        for _ in range(5):
            connected(drafter)
            assert generate(decoder, drafter) > 5
            ended = drafter._link.connection
            assert ended is not None
            ended.close()
            assert wait_for(lambda ended=ended: drafter._link.connection is not ended)  # type: ignore[misc]
        del ended
        connected(drafter)
        # One for the present connection, and one for the connection that the engine last used.
        assert wait_for(lambda: there_are() <= Counter(target=2, draft=1)), there_are()
    finally:
        drafter.shutdown()
        draft.end()


@pytest.mark.parametrize("scheme", ["ipc://", "unix:"])
def test_the_log_says_why_a_draft_was_lost(
    scheme: str,
    decoder: Decoder,
    folders: tuple[Path, Path],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    address = f"{scheme}{tmp_path}/draft.sock"
    draft = Life(address, folders)
    drafter = RemoteDrafter(address, TargetIdentity.of(decoder), decoder.weight, torch.device("cpu"))
    try:
        connected(drafter)
        draft.end()
        line = re.compile(rf"lost the draft at {re.escape(address)} \(.+\); decoding without drafts")
        assert wait_for(lambda: any(line.match(message) for message in caplog.messages)), caplog.messages
        print(caplog.messages)
    finally:
        drafter.shutdown()


@pytest.mark.parametrize("scheme", ["ipc://", "unix:"])
def test_the_age_of_a_draft_and_lost_connections_are_known(
    scheme: str, decoder: Decoder, folders: tuple[Path, Path], tmp_path: Path
) -> None:
    address = f"{scheme}{tmp_path}/draft.sock"
    began_s = time.monotonic()
    draft = Life(address, folders)
    drafter = RemoteDrafter(address, TargetIdentity.of(decoder), decoder.weight, torch.device("cpu"))
    try:
        for lost in range(2):
            connected(drafter)
            route = drafter.route()
            assert route.connections_lost == lost
            assert route.uptime_s is not None
            assert 0 < route.uptime_s < time.monotonic() - began_s
            draft.end()
            assert wait_for(lambda lost=lost: drafter.route().connections_lost == lost + 1)  # type: ignore[misc]
            assert drafter.route().uptime_s is None
            began_s = time.monotonic()
            draft = Life(address, folders)
    finally:
        drafter.shutdown()
        draft.end()
