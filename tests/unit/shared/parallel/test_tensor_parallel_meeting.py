"""Tests of the meeting of ranks: with a secret, within a time limit, and despite strangers' connections."""

from __future__ import annotations

import socket
import threading
from typing import cast

import pytest
import torch.distributed as dist

from outrider.shared.base.errors import ConfigurationError, UnavailableError
from outrider.shared.parallel import channel
from outrider.shared.parallel.channel import (
    RankConnection,
    RankReport,
    ReportKind,
    accept_ranks,
    connect_rank,
    store_of_these,
)


def test_only_ranks_that_know_the_secret_are_accepted() -> None:
    store = dist.HashStore()
    accepted: dict[int, RankConnection] = {}
    thread = threading.Thread(target=lambda: accepted.update(accept_ranks(store, "127.0.0.1", 3, 30)))
    thread.start()
    host, port, secret = bytes(store.get("outrider/control")).decode().split(" ")
    for greeting in (
        b"guess 1",
        f"{secret} 0".encode(),
        f"{secret} 3".encode(),
        f"{secret} x".encode(),
        b"\xff\xfe",
    ):
        stranger = RankConnection(socket.create_connection((host, int(port))))
        stranger.send(greeting)
        assert stranger.receive() is None, "the connection must be closed"
        stranger.close()
    for stray in (
        b"GET / HTTP/1.0\r\n\r\n",
        b"\x41\0\0\0",
        b"\x30\0\0\0half",
        b"",
    ):  # Bytes that a port scanner or another program may send.
        with socket.create_connection((host, int(port))) as scanner:
            scanner.sendall(stray)
    ranks = [connect_rank(store, rank, 5) for rank in (2, 1)]
    thread.join(30)
    assert sorted(accepted) == [1, 2]
    ranks[0].report(RankReport(ReportKind.DONE, "two"))
    assert accepted[2].receive_report() == RankReport(ReportKind.DONE, "two")
    for connection in [*ranks, *accepted.values()]:
        connection.close()


class Dripping:
    """A socket that delivers one byte every two seconds of its own fake clock."""

    def __init__(self, said: bytes) -> None:
        self.said = said
        self.now = 100.0
        self.timeout_s: float | None = None

    def monotonic(self) -> float:
        return self.now

    def setsockopt(self, *option: object) -> None:
        pass

    def settimeout(self, timeout_s: float | None) -> None:
        assert timeout_s is None or timeout_s > 0
        self.timeout_s = timeout_s

    def recv(self, count: int) -> bytes:
        assert count >= 1
        if self.timeout_s is not None and self.timeout_s < 2.0:
            self.now += self.timeout_s
            raise TimeoutError
        self.now += 2.0
        part, self.said = self.said[:1], self.said[1:]
        return part


def test_a_greeting_has_one_deadline_however_it_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    dripping = Dripping(b"\x08\0\0\0" + b"a greeting")
    monkeypatch.setattr(channel, "time", dripping)
    connection = RankConnection(cast("socket.socket", dripping))
    assert connection.receive_by(dripping.now + 5.0, 64) is None
    assert dripping.now == 105.0
    patient = Dripping(b"\x02\0\0\0" + b"ok, and more")
    monkeypatch.setattr(channel, "time", patient)
    connection = RankConnection(cast("socket.socket", patient))
    assert connection.receive_by(patient.now + 60.0, 64) == b"ok"
    assert patient.timeout_s is None, "later frames have no deadline"
    assert patient.said == b", and more", "the following bytes must stay unread"


def test_a_store_that_outlives_the_ranks_leads_to_the_new_ones() -> None:
    """After torchrun restarts all ranks, a fast rank finds the address of the previous rank 0."""
    store = dist.HashStore()
    prefixes = []
    for _start in range(2):
        accepted: dict[int, RankConnection] = {}
        found: list[RankConnection] = []
        rank = threading.Thread(target=lambda to=found: to.append(connect_rank(store, 1, 30)))
        rank.start()
        accepted |= accept_ranks(store, "127.0.0.1", 2, 30)
        rank.join(30)
        found[0].report(RankReport(ReportKind.DONE, "one"))
        assert accepted[1].receive_report() == RankReport(ReportKind.DONE, "one")
        store_of_these(store).set("key", "value")
        prefixes.append(bytes(store.get("outrider/control")).decode().split(" ")[2])
        assert bytes(store.get(f"{prefixes[-1]}/key")) == b"value"
        for connection in (*found, *accepted.values()):
            connection.close()
    assert prefixes[0] != prefixes[1]


def test_ranks_that_do_not_come_are_named() -> None:
    with pytest.raises(UnavailableError, match=r"ranks \[1, 2\] did not connect"):
        accept_ranks(dist.HashStore(), "127.0.0.1", 3, 0.2)


def test_an_address_of_another_host_is_refused_by_name() -> None:
    with pytest.raises(ConfigurationError, match="MASTER_ADDR"):
        accept_ranks(dist.HashStore(), "192.0.2.1", 2, 1)
