"""Settings: flag > environment > file > default; errors name the setting and where to change it."""

from __future__ import annotations

from pathlib import Path

import pytest

from outrider.shared.base.errors import ConfigurationError
from outrider.shared.base.settings import ServiceSettings, settings_config


class ToySettings(ServiceSettings):
    model_config = settings_config("toy")

    port: int = 1
    names: tuple[str, ...] = ()
    model: Path | None = None
    api_key: tuple[str, ...] = ()


def test_flags_win_over_environment_over_file_over_default(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "settings.toml"
    assert ToySettings.load().port == 1
    file.write_text("port = 2\n")
    assert ToySettings.load(config_file=file).port == 2
    monkeypatch.setenv("OUTRIDER_TOY_PORT", "3")
    assert ToySettings.load(config_file=file).port == 3
    assert ToySettings.load({"port": 4}, config_file=file).port == 4
    # A flag that was not given does not override the other sources.
    assert ToySettings.load({"port": None}, config_file=file).port == 3


@pytest.mark.parametrize("text", ["a,b", "a, b,", '["a", "b"]'])
def test_lists_come_from_the_environment_as_commas_or_json(
    monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setenv("OUTRIDER_TOY_NAMES", text)
    assert ToySettings.load().names == ("a", "b")


def test_a_wrong_value_names_field_flag_and_variable() -> None:
    with pytest.raises(ConfigurationError, match=r"port: .*--port.*OUTRIDER_TOY_PORT") as caught:
        ToySettings.load({"port": "many"})
    assert caught.value.field == "port"


def test_an_unknown_flag_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="prot: unknown setting"):
        ToySettings.load({"prot": 1})


def test_an_unknown_key_of_the_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "settings.json"
    file.write_text('{"prot": 1}')
    with pytest.raises(ConfigurationError, match="prot: unknown setting"):
        ToySettings.load(config_file=file)


def test_an_unknown_variable_with_our_prefix_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_TOY_PROT", "1")
    with pytest.raises(ConfigurationError, match="OUTRIDER_TOY_PROT") as caught:
        ToySettings.load()
    assert "OUTRIDER_TOY_PORT" in caught.value.message


def test_variables_of_other_services_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_TARGET", "/models/x")
    monkeypatch.setenv("OUTRIDER_TARGET_MODEL", "/models/x")
    assert ToySettings.load() == ToySettings()


@pytest.mark.parametrize(
    ("name", "text"), [("s.toml", "port = "), ("s.json", "{"), ("s.json", "[1]"), ("missing.toml", None)]
)
def test_an_unreadable_settings_file_is_named(tmp_path: Path, name: str, text: str | None) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(ConfigurationError, match=name):
        ToySettings.load(config_file=tmp_path / name)


def test_settings_are_frozen_and_the_log_holds_no_secret() -> None:
    settings = ToySettings(api_key=("s3cret",))
    with pytest.raises(ValueError, match="frozen"):
        settings.port = 5  # type: ignore[misc]
    assert "s3cret" not in str(settings.resolved())
    assert "s3cret" not in str(settings.for_log())


def test_the_log_names_the_settings_that_differ() -> None:
    assert ToySettings().for_log() == {}
    assert ToySettings(port=81).for_log() == {"port": 81}
