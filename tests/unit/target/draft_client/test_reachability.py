"""Start-up waits longer for a draft that listens at its address than for an absent draft."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from outrider.services.target.draft_client import reachability
from outrider.services.target.draft_client.reachability import ABSENT_S, LOOK_S, Reachability, listens
from outrider.services.target.settings import TargetSettings


def test_a_draft_that_warms_up_listens_already(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "draft.sock"))
        server.listen()
        assert listens(f"unix:{tmp_path}/draft.sock")
        assert listens(f"ipc://{tmp_path}/draft.sock"), "gRPC listens on the path without a suffix"
    assert not listens(f"unix:{tmp_path}/draft.sock"), "a socket file without a listener does not count"
    assert not listens(f"unix:{tmp_path}/other.sock")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert listens(f"127.0.0.1:{port}")
    assert not listens(f"127.0.0.1:{port}")


def test_one_that_is_not_there_is_given_up_before_one_that_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, there, looks = [100.0], [True], []
    monkeypatch.setattr(reachability, "listens", lambda address: looks.append(address) or there[0])
    away = Reachability("unix:/draft", lambda: clock[0])
    assert not away.is_long()
    clock[0] += ABSENT_S - 0.1
    assert not away.is_long()
    assert not looks, "no connection is tried during the grace period"
    for _ in range(50):
        clock[0] += 0.1
        assert not away.is_long()
    assert len(looks) <= 5.0 / LOOK_S + 1, "repeated tries must not fill the draft's backlog"
    there[0] = False
    clock[0] += LOOK_S
    assert away.is_long()
    nothing = Reachability(None, lambda: clock[0])
    assert not nothing.is_long()
    clock[0] += ABSENT_S
    assert nothing.is_long()


def test_a_draft_has_time_for_a_trial_and_its_recordings() -> None:
    settings = TargetSettings.load({"model": "/m"})
    assert settings.draft_wait_s >= 3 * ABSENT_S
