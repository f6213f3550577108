"""Addresses of targets from the setting, from files and from names."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import pytest

from outrider.services.gateway.settings import GatewaySettings
from outrider.services.gateway.target_sources import TargetSource
from outrider.shared.base.errors import ConfigurationError


async def test_a_file_has_one_address_a_line(tmp_path: Path) -> None:
    file = tmp_path / "targets"
    file.write_text("# all targets\n10.0.0.1:7001\n\nunix:/run/b.sock  # the second\n")
    source = TargetSource(f"file://{file}")
    assert source.changes
    assert await source.addresses() == ("10.0.0.1:7001", "unix:/run/b.sock")


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("", "1 to 256 addresses"),
        ("nonsense\n", "host:port"),
        (b"\xff\xfe", "cannot be read"),
        (None, "cannot"),
    ],
)
async def test_a_file_that_cannot_be_used_is_named(
    tmp_path: Path, content: str | bytes | None, complaint: str
) -> None:
    file = tmp_path / "targets"
    if content is not None:
        file.write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(ConfigurationError, match=complaint) as error:
        await TargetSource(f"file://{file}").addresses()
    assert str(file) in error.value.message


async def test_a_name_stands_for_its_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    async def resolve(host: str, port: int, **options: object) -> list[tuple[object, ...]]:
        assert (host, port) == ("targets.svc", 7001)
        kind = (socket.AF_INET, socket.SOCK_STREAM, 6, "")
        return [(*kind, ("10.0.0.2", port)), (*kind, ("10.0.0.1", port)), (*kind, ("fe80::1", port, 0, 0))]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", resolve)
    found = await TargetSource("dns:///targets.svc:7001").addresses()
    assert found == ("10.0.0.1:7001", "10.0.0.2:7001", "[fe80::1]:7001")


async def test_an_unknown_name_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    async def resolve(*args: object, **options: object) -> None:
        raise socket.gaierror("Name or service not known")

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", resolve)
    with pytest.raises(ConfigurationError, match=r"targets.svc cannot be resolved"):
        await TargetSource("dns:///targets.svc:7001").addresses()


def test_settings_take_several_addresses() -> None:
    settings = GatewaySettings(target=("127.0.0.1:7001, unix:/run/b.sock", "dns:///t:7001"))
    settings.check()
    assert [one.changes for one in settings.sources] == [False, False, True]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("target", ()),
        ("target", "127.0.0.1"),
        ("target", "dns:///name"),
        ("target", "file:///does/not/exist"),
        ("model_tokenizer", "/models/a"),
    ],
)
def test_settings_refuse_entries_that_cannot_be_used(field: str, value: object) -> None:
    with pytest.raises(ConfigurationError) as error:
        GatewaySettings(**{field: value}).check()
    assert error.value.field == field
