"""Tests of the ranks' control plane: commands, packed inputs, and detection of dead and silent ranks."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from outrider.shared.attn.base import AttentionBatch
from outrider.shared.base.errors import OutriderError, ProtocolError, UnavailableError
from outrider.shared.kv.pool import KVPool
from outrider.shared.parallel import commands
from outrider.shared.parallel.channel import RankConnection, RankReport, ReportKind
from outrider.shared.parallel.commands import Forward, MakePool, Scrub, Stop, decode, encode
from outrider.shared.parallel.lead import Lead
from outrider.shared.parallel.lead_decoder import LeadDecoder
from outrider.shared.parallel.packing import StepInputs, packed_words
from outrider.shared.parallel.worker import Worker

KINDS = st.sampled_from(commands._KINDS)


@given(KINDS, st.data())
def test_commands_arrive_as_they_were_sent(kind: type[commands.Command], data: st.DataObject) -> None:
    numbers = [data.draw(st.integers(-(1 << 63), (1 << 63) - 1)) for _ in fields(kind)]
    command = kind(*numbers)
    assert decode(encode(command)) == command


@pytest.mark.parametrize("body", [b"", b"\xff", encode(MakePool(1, 2))[:-1], encode(Stop()) + b"x"])
def test_bytes_that_are_no_command_are_refused(body: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode(body)


@pytest.mark.parametrize("words", [0, 1, 3])
@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize(
    ("token_type", "position_type"),
    [(torch.int32, torch.int64), (torch.int64, torch.int32), (torch.int32, torch.int32)],
)
def test_a_steps_inputs_survive_packing(
    words: int, mapped: bool, token_type: torch.dtype, position_type: torch.dtype
) -> None:
    rows, bs, pages = 5, 3, 7
    tables = 8 if mapped else bs

    def some(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.randint(-(1 << 30), 1 << 30, shape).to(dtype)

    inputs = StepInputs(
        tokens=some(rows, dtype=token_type),
        positions=some(2 * rows, dtype=position_type)[::2],  # strided
        batch=AttentionBatch(
            page_table=some(tables, pages + 2)[:, :pages],
            prefix_lens=some(bs),
            kv_lens=some(bs),
            query_start=some(bs + 1),
            ancestors=some(rows, words) if words else None,
            slots=some(rows, dtype=torch.int64) << 20,
            max_query_len=4,
            max_kv_len=99,
            table_rows=some(bs) if mapped else None,
            ragged=mapped,
        ),
    )
    command = inputs.command()
    assert decode(encode(command)) == command
    assert isinstance(command, Forward)
    buffer = inputs.pack()
    assert buffer.shape == (packed_words(command),)
    found = StepInputs.unpack(buffer, command)
    for name in ("tokens", "positions"):
        assert torch.equal(getattr(found, name), getattr(inputs, name))
        assert getattr(found, name).dtype is getattr(inputs, name).dtype
    for field in fields(AttentionBatch):
        got, want = getattr(found.batch, field.name), getattr(inputs.batch, field.name)
        assert torch.equal(got, want) if isinstance(want, torch.Tensor) else got == want


@pytest.mark.parametrize(
    ("lens", "received"), [(((70, 29),), ((70, 29),)), (((0, 4), (70, 29)), None), (None, None)]
)
def test_the_lengths_of_a_single_chunk_survive_packing(
    lens: tuple[tuple[int, int], ...] | None, received: tuple[tuple[int, int], ...] | None
) -> None:
    bs = len(lens) if lens else 1
    zeros = torch.zeros(40, dtype=torch.int32)
    batch = AttentionBatch(
        page_table=zeros[: 7 * bs].view(bs, 7),
        prefix_lens=zeros[:bs],
        kv_lens=zeros[:bs],
        query_start=zeros[: bs + 1],
        ancestors=None,
        slots=zeros.long(),
        max_query_len=29,
        max_kv_len=99,
        host_lens=lens,
    )
    inputs = StepInputs(tokens=zeros, positions=zeros, batch=batch)
    assert StepInputs.unpack(inputs.pack(), inputs.command()).batch.host_lens == received


@pytest.fixture
def pair() -> Iterator[tuple[RankConnection, RankConnection]]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        far = RankConnection(socket.create_connection(server.getsockname()))
        near = RankConnection(server.accept()[0])
    yield near, far
    near.close()
    far.close()


class Failures:
    """Stores the error that a lead reports."""

    def __init__(self) -> None:
        self.error: OutriderError | None = None
        self.noticed = threading.Event()

    def __call__(self, error: OutriderError) -> None:
        self.error = error
        self.noticed.set()


def test_a_rank_that_is_gone_breaks_the_group_once_and_for_all(
    pair: tuple[RankConnection, RankConnection],
) -> None:
    near, far = pair
    failures = Failures()
    lead = Lead({1: near}, failures)
    lead.send(MakePool(3, 16))
    assert decode(far.receive() or b"") == MakePool(3, 16)
    far.close()
    assert failures.noticed.wait(5)
    with pytest.raises(UnavailableError, match="rank 1 is lost"):
        lead.send(MakePool(3, 16))
    with pytest.raises(UnavailableError, match="rank 1 is lost"):
        lead.wait_done(5)


@pytest.mark.parametrize("awake_s", [0.0, 0.02, 30.0])
def test_a_receiver_that_stays_awake_gets_every_frame_and_sees_the_end(
    pair: tuple[RankConnection, RankConnection], awake_s: float
) -> None:
    near, far = pair
    far.awake_s = awake_s
    bodies = [b"first", b"x" * 60_000, b"", b"last"]
    near.send(bodies[0])
    assert far.receive() == bodies[0]

    def finish() -> None:
        for body in bodies[1:]:
            near.send(body)
        near.close()

    later = threading.Timer(0.1, finish)
    later.start()
    assert [far.receive() for _ in bodies[1:]] == bodies[1:]
    assert far.receive() is None
    later.join()


def test_what_a_rank_reports_is_what_the_caller_is_told(pair: tuple[RankConnection, RankConnection]) -> None:
    near, far = pair
    lead = Lead({1: near}, Failures())
    far.report(RankReport(ReportKind.BEAT))
    far.report(RankReport(ReportKind.DONE, "loaded"))
    assert lead.wait_done(5) == {1: "loaded"}
    far.report(RankReport(ReportKind.FAILED, "no memory"))
    with pytest.raises(UnavailableError, match="rank 1 failed: no memory"):
        lead.wait_done(5)


def test_a_silent_rank_is_lost(
    pair: tuple[RankConnection, RankConnection], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outrider.shared.parallel.lead.SILENT_BEATS", 3)
    monkeypatch.setattr("outrider.shared.parallel.lead.BEAT_S", 0.05)
    failures = Failures()
    Lead({1: pair[0]}, failures)
    assert failures.noticed.wait(5)
    assert "silent" in str(failures.error)


def test_an_error_on_rank_0_in_the_middle_of_a_command_breaks_the_group(
    pair: tuple[RankConnection, RankConnection],
) -> None:
    failures = Failures()
    lead = Lead({1: pair[0]}, failures)

    def work() -> None:
        with lead.together(MakePool(1, 1)):
            raise RuntimeError("out of memory")

    with pytest.raises(UnavailableError, match="rank 0 failed in MakePool: out of memory"):
        work()
    assert failures.error is not None


def test_an_error_while_a_rank_is_silent_names_the_rank_and_not_torch(
    pair: tuple[RankConnection, RankConnection], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outrider.shared.parallel.lead.BEAT_S", 0.05)
    lead = Lead({1: pair[0]}, Failures())
    with (
        pytest.raises(UnavailableError, match="rank 1 is lost: it has been silent") as raised,
        lead.together(MakePool(1, 1)),
    ):
        raise RuntimeError("[unbound_buffer.cc:78] Timed out waiting 3000ms for recv operation to complete")
    assert "unbound_buffer" not in raised.value.message


@pytest.mark.parametrize("alive", [True, False])
def test_a_step_that_does_not_come_back_breaks_the_group(
    alive: bool, pair: tuple[RankConnection, RankConnection], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outrider.shared.parallel.lead.BEAT_S", 0.1)
    failures = Failures()
    lead = Lead({1: pair[0]}, failures, step_timeout_s=0.5)
    with lead.step():
        lead.send(MakePool(1, 1))
        while not failures.noticed.wait(0.02):
            if alive:
                pair[1].report(RankReport(ReportKind.BEAT))
    assert re.search(
        "a step has not returned for 0.5 s although all ranks run" if alive else "rank 1 is lost: .* silent",
        str(failures.error),
    )


def test_between_steps_nothing_is_overdue(
    pair: tuple[RankConnection, RankConnection], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outrider.shared.parallel.lead.BEAT_S", 0.05)
    failures = Failures()
    lead = Lead({1: pair[0]}, failures, step_timeout_s=0.05, bounded=True)
    with lead.step():
        lead.send(MakePool(1, 1))
        with lead.together(MakePool(1, 1)):  # gloo's collectives time out by themselves.
            for _ in range(8):
                pair[1].report(RankReport(ReportKind.BEAT))
                assert not failures.noticed.wait(0.05)
    for _ in range(8):
        pair[1].report(RankReport(ReportKind.BEAT))
        assert not failures.noticed.wait(0.05)


def test_a_process_that_hangs_in_a_step_ends_by_itself_and_says_why() -> None:
    """The main thread waits forever, as for a device, so a SIGTERM handler never runs."""
    code = (
        "import socket, signal, sys, threading\n"
        "from outrider.services.target.parallel import group\n"
        "from outrider.shared.parallel.channel import RankConnection\n"
        "from outrider.shared.parallel.lead import Lead\n"
        "group.END_GRACE_S = 0.1\n"
        "signal.signal(signal.SIGTERM, lambda *_: None)\n"
        "connection = RankConnection(socket.create_connection(('127.0.0.1', int(sys.argv[1]))))\n"
        "with Lead({1: connection}, group.end_soon, 1.0).step():\n"
        "    connection.send(b'in the step')\n"
        "    threading.Event().wait()\n"
    )
    with socket.create_server(("127.0.0.1", 0)) as server:
        lead = subprocess.Popen(
            [sys.executable, "-c", code, str(server.getsockname()[1])],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        try:
            connection = RankConnection(server.accept()[0])
            assert connection.receive() == b"in the step"
            lead.terminate()
            output, _ = lead.communicate(timeout=20)
            connection.close()
            assert lead.returncode == 1
            assert "rank 1 is lost" in output
        finally:
            if lead.poll() is None:
                lead.kill()
                lead.wait()


def test_a_process_that_cannot_leave_its_group_ends_all_the_same() -> None:
    """NCCL cannot leave a group either while one of its kernels never ends."""
    code = (
        "import threading\n"
        "from types import SimpleNamespace\n"
        "from outrider.services.target.parallel import group\n"
        "from outrider.shared.parallel.lead import Lead\n"
        "group.STOP_TIMEOUT_S = 0.1\n"
        "stuck = SimpleNamespace(close=threading.Event().wait)\n"
        "group.RankGroup(None, Lead({}, group.end_soon), stuck, []).close()\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], timeout=60, check=False, capture_output=True, text=True
    )
    assert ended.returncode == 1
    assert "Traceback" not in ended.stderr


def late(rank: int) -> Any:
    """Return collectives of a rank that has missed another rank's data."""
    return SimpleNamespace(rank=rank, lost=lambda: True, broadcast=lambda tensor: tensor.zero_())


def test_rows_that_are_no_numbers_because_a_rank_was_late_end_the_group_at_rank_0(
    pair: tuple[RankConnection, RankConnection],
) -> None:
    failures = Failures()
    decoder = LeadDecoder.__new__(LeadDecoder)
    decoder.collectives = late(0)
    decoder.connect(Lead({1: pair[0]}, failures), read_head=lambda: pytest.fail("the head must not be read"))
    with pytest.raises(UnavailableError, match="rank 0 did not receive another rank's data in time"):
        decoder.spread_scrub(torch.tensor([2]))
    assert failures.error is not None


def test_rows_that_are_no_numbers_because_a_rank_was_late_end_the_group_at_that_rank(
    pair: tuple[RankConnection, RankConnection],
) -> None:
    near, far = pair
    pool = KVPool(4, 16, 1, 1, 8, torch.float32, "cpu")
    decoder: Any = SimpleNamespace(collectives=late(1), device=torch.device("cpu"), make_pool=lambda *_: pool)
    attention: Any = None
    failures = Failures()
    lead = Lead({1: near}, failures)
    lead.send(MakePool(4, 16))
    lead.send(Scrub(1))
    with pytest.raises(UnavailableError, match="rank 1 did not receive another rank's data in time"):
        Worker(decoder, attention, far).run()
    assert failures.noticed.wait(5)
    assert "rank 1 did not receive another rank's data in time" in str(failures.error)


def test_closing_in_the_middle_of_a_step_is_a_failure(pair: tuple[RankConnection, RankConnection]) -> None:
    failures = Failures()
    lead = Lead({1: pair[0]}, failures)
    with lead.step():
        lead.close()
    assert "in the middle of a step" in str(failures.error)


def test_closing_is_no_failure(pair: tuple[RankConnection, RankConnection]) -> None:
    failures = Failures()
    lead = Lead({1: pair[0]}, failures)
    lead.close()
    assert decode(pair[1].receive() or b"") == Stop()
    assert pair[1].receive() is None
    assert failures.error is None


def test_a_frame_that_is_too_long_is_refused(pair: tuple[RankConnection, RankConnection]) -> None:
    pair[1].socket.sendall(b"\xff\xff\xff\xff")
    with pytest.raises(ProtocolError, match="4294967295"):
        pair[0].receive()


def test_a_process_ends_when_rank_0_is_gone() -> None:
    """The rank's main thread waits forever."""
    code = (
        "import socket, sys, threading\n"
        "from outrider.shared.parallel.channel import RankConnection, beat_until_gone\n"
        "beat_until_gone(RankConnection(socket.create_connection(('127.0.0.1', int(sys.argv[1])))), 0.1)\n"
        "threading.Event().wait()\n"
    )
    with socket.create_server(("127.0.0.1", 0)) as server:
        rank = subprocess.Popen([sys.executable, "-c", code, str(server.getsockname()[1])])
        try:
            connection = RankConnection(server.accept()[0])
            assert connection.receive_report() == RankReport(ReportKind.BEAT)
            connection.close()
            assert rank.wait(10) == 1
        finally:
            if rank.poll() is None:
                os.kill(rank.pid, signal.SIGKILL)
                rank.wait()
