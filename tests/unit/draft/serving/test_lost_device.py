"""A draft process whose GPU cannot be used any more ends, so that a supervisor starts a new one."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from outrider.services.draft import app
from outrider.services.draft.serving.loop import DraftLoop
from outrider.shared.base.errors import ProtocolError
from outrider.shared.engine import device_health


@pytest.mark.parametrize(("lost", "code"), [(True, 1), (False, 0)])
def test_the_service_ends_only_if_the_device_is_lost(
    monkeypatch: pytest.MonkeyPatch, lost: bool, code: int
) -> None:
    stops: list[Any] = []
    alarms: list[int] = []

    class Service:
        address = ""
        engine = SimpleNamespace(strategy=SimpleNamespace(info=SimpleNamespace(model_id="m")))

        def __init__(self, _settings: object, on_error: Callable[[Exception], None]) -> None:
            self._on_error = on_error

        def start(self) -> None:
            self._on_error(RuntimeError("an illegal memory access was encountered"))
            if not lost:
                stops[0].set()

        def stop(self) -> None: ...

    class Signal(app.StopSignal):
        def __enter__(self) -> Signal:
            stops.append(self)
            return self

    settings: Any = SimpleNamespace(
        check=lambda: None,
        log_level="error",
        log_json=False,
        for_log=dict,
        secure_process=lambda: None,
        torch_device=lambda: None,
    )
    monkeypatch.setattr(device_health, "device_is_lost", lambda _device: lost)
    monkeypatch.setattr(app, "DraftService", Service)
    monkeypatch.setattr(app, "StopSignal", Signal)
    monkeypatch.setattr(app, "configure_logging", lambda *_: None)
    monkeypatch.setattr(app.signal, "alarm", alarms.append)
    assert app.run(settings) == code
    assert bool(alarms) is lost


def test_the_loop_reports_unexpected_errors_only() -> None:
    errors: list[Exception] = []
    engine: Any = SimpleNamespace(
        metrics=SimpleNamespace(failures=SimpleNamespace(inc=lambda: None)), give_up=lambda: 0
    )
    loop = DraftLoop(engine, errors.append)
    fault = RuntimeError("a kernel failed")

    def fail(error: Exception) -> None:
        raise error

    loop.run_here(lambda: fail(fault))
    assert errors == [fault]
    loop.submit = lambda command: command()  # type: ignore[assignment,return-value,method-assign]
    for error in (ProtocolError("the peer is wrong", field="message"), ValueError("unexpected")):
        with pytest.raises(type(error)):
            loop.call(lambda error=error: fail(error))  # type: ignore[misc]
    assert [type(error) for error in errors] == [RuntimeError, ValueError]
