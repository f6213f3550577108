"""The keys file: its fields, errors that name the line or field but no value, modes, and reloading."""

from __future__ import annotations

import hmac
import json
import os
from pathlib import Path

import pytest

from outrider.services.gateway.keys.entry import KeyEntry, digest_of
from outrider.services.gateway.keys.key_metrics import KeyMetrics
from outrider.services.gateway.keys.key_ring import KeyRing
from outrider.services.gateway.keys.keys_file import MAX_FILE_BYTES, read_keys_file
from outrider.shared.base.errors import ConfigurationError, ErrorCode, OutriderError
from outrider.shared.base.generation import SpeculationMode
from outrider.shared.obs.metrics import Metrics

SECRET = "sk-0123456789abcdef"
ROW = f'[[keys]]\nname = "app"\nkey = "{SECRET}"\n'


def write(file: Path, text: str, mode: int = 0o600) -> Path:
    file.write_text(text, encoding="utf-8")
    file.chmod(mode)
    return file


def ring_of(file: Path | None, *fixed: KeyEntry) -> KeyRing:
    return KeyRing(fixed, file, lambda: 0.0, KeyMetrics(Metrics()))


def test_all_fields(tmp_path: Path) -> None:
    text = f"""
    [[keys]]
    name = "batch"
    key_sha256 = "{digest_of(SECRET).hex()}"
    requests_per_minute = 60
    tokens_per_minute = 1000
    max_concurrent = 4
    priority = [-10, -1]
    speculation = ["off"]
    models = ["alpha"]
    admin = true
    cache_salt = "batch"
    """
    (entry,) = read_keys_file(write(tmp_path / "keys.toml", text))
    assert entry == KeyEntry(
        "batch",
        digest_of(SECRET),
        60,
        1000,
        4,
        (-10, -1),
        (SpeculationMode.OFF,),
        frozenset(["alpha"]),
        True,
        "batch",
    )
    as_json = json.dumps({"keys": [{"name": "batch", "key": SECRET}]})
    (entry,) = read_keys_file(write(tmp_path / "keys.json", as_json))
    assert entry == KeyEntry("batch", digest_of(SECRET))


@pytest.mark.parametrize(
    ("text", "named"),
    [
        (f'{ROW}requests_per_minute = "{SECRET}"\n', r"keys\.0\.requests_per_minute"),
        (f"{ROW}tokens_per_minute = 0\n", r"keys\.0\.tokens_per_minute: .*greater than or equal to 1"),
        (f"{ROW}max_concurrent = 1.5\n", r"keys\.0\.max_concurrent"),
        (f"{ROW}priority = [3, 1]\n", r"keys\.0\.priority: the first number"),
        (f"{ROW}priority = [0, 4294967296]\n", r"keys\.0\.priority\.1"),
        (f'{ROW}speculation = ["fast"]\n', r"keys\.0\.speculation\.0"),
        (f"{ROW}speculation = []\n", r"keys\.0\.speculation"),
        (f"{ROW}rpm = 4\n", r"keys\.0\.rpm: there is no such field.*requests_per_minute"),
        (f'{ROW}key_sha256 = "{"0" * 64}"\n', r"keys\.0: set exactly one"),
        ('[[keys]]\nname = "app"\n', r"keys\.0: set exactly one"),
        ('[[keys]]\nname = "app"\nkey_sha256 = "00"\n', r"keys\.0\.key_sha256"),
        (f'[[keys]]\nname = "a b"\nkey = "{SECRET}"\n', r"keys\.0\.name"),
        ('[[keys]]\nname = "app"\nkey = "short"\n', r"keys\.0\.key: .*16"),
        (f'{ROW}[[keys]]\nname = "app"\nkey = "{SECRET}2"\n', "two keys with the name 'app'"),
        (f'{ROW}[[keys]]\nname = "other"\nkey = "{SECRET}"\n', "'app' and 'other' have the same key"),
        (f'[[keys]]\nname = "app"\nkey = {SECRET}\n', "not valid TOML .*line 3"),
        (f'[[keys]]\nname = "app"\nkey = "{SECRET}\n', "not valid TOML .*line 3"),
        ("keys = []\n", "keys: .*at least 1"),
        ("", "keys: Field required"),
        ("[general]\n", "keys: Field required"),
        (" " * (MAX_FILE_BYTES + 1), "is larger than"),
    ],
)
def test_an_error_names_the_line_or_the_field_but_no_value(tmp_path: Path, text: str, named: str) -> None:
    file = write(tmp_path / "keys.toml", text)
    with pytest.raises(ConfigurationError, match=named) as caught:
        read_keys_file(file)
    assert str(file) in caught.value.message
    assert SECRET not in caught.value.message
    assert caught.value.field == "api_keys_file"


def test_invalid_json_and_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"not valid JSON: .*line 2"):
        read_keys_file(write(tmp_path / "keys.json", f'{{\n"{SECRET}"}}'))
    with pytest.raises(ConfigurationError, match="nested too deeply"):
        read_keys_file(write(tmp_path / "deep.json", "[" * 200_000))
    with pytest.raises(ConfigurationError, match="cannot be read: No such file"):
        read_keys_file(tmp_path / "none.toml")
    (tmp_path / "latin.toml").write_bytes(b"\xff")
    with pytest.raises(ConfigurationError, match="not UTF-8"):
        read_keys_file(tmp_path / "latin.toml")


@pytest.mark.parametrize(
    ("mode", "fix"), [(0o620, "chmod go-w"), (0o602, "chmod go-w"), (0o604, "chmod o-r")]
)
def test_a_file_that_other_users_can_change_or_read_is_refused(tmp_path: Path, mode: int, fix: str) -> None:
    with pytest.raises(ConfigurationError, match=fix):
        read_keys_file(write(tmp_path / "keys.toml", ROW, mode))


def test_others_may_read_digests(tmp_path: Path) -> None:
    text = f'[[keys]]\nname = "app"\nkey_sha256 = "{digest_of(SECRET).hex()}"\n'
    assert read_keys_file(write(tmp_path / "keys.toml", text, 0o644))
    with pytest.raises(ConfigurationError, match="chmod o-r"):
        read_keys_file(write(tmp_path / "keys.toml", text + 'cache_salt = "x"\n', 0o644))


def test_a_changed_file_is_reloaded_and_keeps_what_was_used(tmp_path: Path) -> None:
    file = write(tmp_path / "keys.toml", ROW + "requests_per_minute = 2\n")
    ring = ring_of(file)
    caller = ring.identify(f"Bearer {SECRET}")
    assert caller is not None
    caller.count_request()
    assert not ring.reload_if_changed()
    replace(file, ROW.replace(SECRET, f"{SECRET}-new") + "requests_per_minute = 3\n")
    assert ring.reload_if_changed()
    with pytest.raises(OutriderError) as caught:
        ring.identify(f"Bearer {SECRET}")
    assert caught.value.code is ErrorCode.UNAUTHENTICATED
    assert ring.identify(f"Bearer {SECRET}-new") is caller
    assert caller.headers()["x-ratelimit-remaining-requests"] == "2"


@pytest.mark.parametrize("damage", ["[[keys]\n", "", ROW + "rpm = 1\n"])
def test_a_bad_file_keeps_the_old_keys_and_is_logged(
    tmp_path: Path, damage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(tmp_path / "keys.toml", ROW)
    metrics = Metrics()
    ring = KeyRing((), file, lambda: 0.0, KeyMetrics(metrics))
    replace(file, damage)
    assert not ring.reload_if_changed()
    assert ring.identify(f"Bearer {SECRET}") is not None
    assert b"outrider_api_keys_file_ok 0.0" in metrics.render().encode()
    file.unlink()
    assert not ring.reload_if_changed()
    assert ring.identify(f"Bearer {SECRET}") is not None
    replace(file, ROW)
    assert ring.reload_if_changed()
    assert b"outrider_api_keys_file_ok 1.0" in metrics.render().encode()
    assert SECRET not in "".join(capsys.readouterr())


def test_the_chmod_that_an_error_asks_for_is_enough(tmp_path: Path) -> None:
    file = write(tmp_path / "keys.toml", ROW)
    metrics = Metrics()
    ring = KeyRing((), file, lambda: 0.0, KeyMetrics(metrics))
    fresh = write(tmp_path / "keys.new", ROW.replace(SECRET, f"{SECRET}-new"), 0o644)
    os.replace(fresh, file)
    assert not ring.reload_if_changed()
    assert b"outrider_api_keys_file_ok 0.0" in metrics.render().encode()
    file.chmod(0o600)
    assert ring.reload_if_changed()
    assert ring.identify(f"Bearer {SECRET}-new") is not None
    assert b"outrider_api_keys_file_ok 1.0" in metrics.render().encode()


def test_every_key_is_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A search that ends at the first match would tell how far down the list a key is."""
    compared: list[bytes] = []

    def compare(left: bytes, right: bytes) -> bool:
        compared.append(right)
        return left == right

    monkeypatch.setattr(hmac, "compare_digest", compare)
    ring = ring_of(None, *(KeyEntry.unlimited(f"key-{key}", key, admin=False) for key in "abc"))
    for key in ("a", "c"):
        compared.clear()
        assert ring.identify(f"Bearer {key}")
        assert compared == [digest_of(one) for one in "abc"]


def test_keys_of_flags_and_of_the_file_work_together(tmp_path: Path) -> None:
    file = write(tmp_path / "keys.toml", ROW)
    ring = ring_of(file, KeyEntry.unlimited("key-1", "fixed", admin=True))
    names = [ring.identify(f"Bearer {key}") for key in ("fixed", SECRET)]
    assert [caller.name for caller in names if caller] == ["key-1", "app"]
    with pytest.raises(ConfigurationError, match="the name 'app'"):
        ring_of(file, KeyEntry.unlimited("app", "fixed", admin=True))
    assert ring_of(None).identify(None) is None


def replace(file: Path, text: str) -> None:
    """Replace a file as editors do, so that its inode changes even if the clock stands still."""
    fresh = write(file.with_suffix(".new"), text)
    os.replace(fresh, file)
