"""Shutdown, logs and listen addresses: signals set a flag, all drain steps run, one log line per event."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import os
import signal
import threading
from pathlib import Path

import pytest

from outrider.services.gateway.keys.entry import digest_of
from outrider.services.gateway.settings import GatewaySettings
from outrider.shared.base.errors import ConfigurationError
from outrider.shared.base.lifecycle import DrainStep, StopSignal, run_steps, watch_stop_signals
from outrider.shared.obs.logging import configure_logging, get_logger, log_context


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_sets_the_flag_and_handlers_are_restored(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with StopSignal() as stop:
        assert not stop.wait(0)
        os.kill(os.getpid(), number)
        assert stop.wait(5)
        assert stop.received is number
        # The second signal restores the default action, so a third one would end the process.
        os.kill(os.getpid(), number)
        while signal.getsignal(number) is not signal.SIG_DFL:
            pass
    assert signal.getsignal(number) is before


def test_outside_the_main_thread_the_flag_is_set_explicitly() -> None:
    seen = []

    def body() -> None:
        with StopSignal() as stop:
            stop.set()
            seen.append(stop.requested)

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    assert seen == [True]


async def test_a_signal_sets_an_asyncio_event() -> None:
    stop = asyncio.Event()
    restore = watch_stop_signals(stop)
    try:
        os.kill(os.getpid(), signal.SIGTERM)
        async with asyncio.timeout(5):
            await stop.wait()
    finally:
        restore()


def test_every_step_of_a_drain_runs(caplog: pytest.LogCaptureFixture) -> None:
    done: list[str] = []

    def fail() -> None:
        raise RuntimeError("broken step")

    steps = [
        DrainStep("first", lambda: done.append("first")),
        DrainStep("second", fail),
        DrainStep("third", lambda: done.append("third")),
    ]
    with caplog.at_level(logging.ERROR):
        assert run_steps(steps) is False
    assert done == ["first", "third"]
    assert "second" in caplog.text
    assert run_steps(steps[:1]) is True


def test_logs_are_lines_with_service_and_request_id() -> None:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    stream = io.StringIO()
    try:
        configure_logging("toy", "info", json=True, stream=stream)
        with log_context(request_id="r1"):
            get_logger("outrider.test").info("hello", answer=42)
        logging.getLogger("outrider.other").warning("plain %s", "text")
        get_logger("outrider.test").debug("hidden")
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
    ours, plain = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert (ours["event"], ours["answer"], ours["request_id"], ours["service"], ours["level"]) == (
        "hello",
        42,
        "r1",
        "toy",
        "info",
    )
    assert (plain["event"], plain["service"]) == ("plain text", "toy")
    assert "request_id" not in plain


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.1.2.3", "example.org"])
def test_a_gateway_reachable_from_other_hosts_needs_a_key_or_the_flag(host: str) -> None:
    with pytest.raises(ConfigurationError, match="--api-key") as caught:
        GatewaySettings(host=host).check()
    assert caught.value.field == "host"
    GatewaySettings(host=host, allow_unauthenticated=True).check()
    GatewaySettings(host=host, api_key=("key",)).check()


@pytest.mark.parametrize("published", ["0.0.0.0", "::", "10.1.2.3"])
def test_a_published_port_reachable_from_other_hosts_needs_a_key(published: str) -> None:
    for host in ("0.0.0.0", "127.0.0.1"):
        with pytest.raises(ConfigurationError, match="set OUTRIDER_API_KEY") as caught:
            GatewaySettings(host=host, published_on=published).check()
        assert caught.value.field == "published_on"
    GatewaySettings(host="0.0.0.0", published_on=published, api_key=("key",)).check()
    GatewaySettings(host="0.0.0.0", published_on=published, allow_unauthenticated=True).check()


@pytest.mark.parametrize("published", ["127.0.0.1", "::1", "localhost"])
def test_a_container_may_listen_on_all_addresses_if_its_port_is_published_locally(published: str) -> None:
    GatewaySettings(host="0.0.0.0", published_on=published).check()


@pytest.mark.parametrize("key", ["", " ", "schlüssel"])
def test_keys_that_could_never_match_are_refused(key: str) -> None:
    with pytest.raises(ConfigurationError, match="api_key"):
        GatewaySettings(api_key=(key,)).check()


def test_api_keys_come_from_a_file(tmp_path: Path) -> None:
    """A key on the command line would show in ps."""
    file = tmp_path / "keys"
    file.write_text("one\n\n two \n", encoding="ascii")
    settings = GatewaySettings(host="0.0.0.0", api_key=("zero",), api_key_file=file)
    settings.check()
    assert [one.digest for one in settings.fixed_keys()] == [digest_of(key) for key in ("zero", "one", "two")]
    file.write_text("\n", encoding="ascii")
    with pytest.raises(ConfigurationError, match="has no key") as caught:
        GatewaySettings(api_key_file=file).check()
    assert caught.value.field == "api_key_file"
    with pytest.raises(ConfigurationError, match="cannot be read"):
        GatewaySettings(api_key_file=tmp_path / "none").check()
