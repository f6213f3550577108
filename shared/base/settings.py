"""Settings of a service, resolved once from command-line flags, environment variables, a file and defaults.

The sources in order of precedence are: flag, environment variable, file, default. The resolved settings
cannot be changed. Unknown keys are refused.

Each service has its own prefix for environment variables (``OUTRIDER_GATEWAY_PORT``,
``OUTRIDER_TARGET_MODEL``, ``OUTRIDER_DRAFT_LISTEN``), so that one environment can configure all three
services. No other code in the project reads settings from the environment.
"""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any, Self, get_args, get_origin

from pydantic import Field, ValidationError, ValidationInfo, field_validator
from pydantic_settings import BaseSettings, EnvSettingsSource, SettingsConfigDict

from outrider.shared.base.errors import ConfigurationError

ENV_PREFIX = "OUTRIDER_"


class Dtype(Enum):
    """Data type of weights and activations. AUTO means float32 on a CPU and bfloat16 on CUDA."""

    AUTO = "auto"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


def settings_config(service: str) -> SettingsConfigDict:
    """Return the pydantic configuration of a service's settings class.

    Usage: ``model_config = settings_config("gateway")``.
    """
    return SettingsConfigDict(
        env_prefix=f"{ENV_PREFIX}{service.upper()}_",
        extra="forbid",
        frozen=True,
        enable_decoding=False,
        protected_namespaces=(),
    )


class ServiceSettings(BaseSettings):
    """Base class of the services' settings.

    The text for a tuple field is comma-separated or a JSON list.
    """

    model_config = settings_config("service")

    @field_validator("*", mode="before")
    @classmethod
    def _split_lists(cls, value: object, info: ValidationInfo) -> object:
        field = cls.model_fields[info.field_name or ""]
        if value == "" and type(None) in get_args(field.annotation):
            return None  # docker compose sets variables that have no value to an empty text
        if not isinstance(value, str) or get_origin(field.annotation) is not tuple:
            return value
        if value.lstrip().startswith("["):
            try:
                return json.loads(value)
            except json.JSONDecodeError as error:
                raise ValueError(f"not a JSON list: {error}") from None
        return tuple(part.strip() for part in value.split(",") if part.strip())

    @classmethod
    def load(cls, flags: Mapping[str, Any] | None = None, config_file: Path | None = None) -> Self:
        """Resolve the settings.

        Args:
            flags: Values from the command line, by field name. A value of None means that the flag was not
                given.
            config_file: A TOML or JSON file that contains values by field name.

        Raises:
            ConfigurationError: A key is unknown or a value is wrong. The message names the field, its flag
                and its environment variable.
        """
        cls._refuse_unknown_environment()
        values = read_settings_file(config_file) if config_file else {}
        values |= EnvSettingsSource(cls)()
        values |= {name: value for name, value in (flags or {}).items() if value is not None}
        try:
            return cls(**values)
        except ValidationError as error:
            raise cls._explain(error) from None

    @classmethod
    def _refuse_unknown_environment(cls) -> None:
        prefix = str(cls.model_config.get("env_prefix", ""))
        for variable in os.environ:
            name = variable.lower().removeprefix(prefix.lower())
            if variable.upper().startswith(prefix) and name not in cls.model_fields:
                known = ", ".join(f"{prefix}{field.upper()}" for field in cls.model_fields)
                message = f"Unknown environment variable {variable}. Known variables: {known}."
                raise ConfigurationError(message, field=variable, reason="unknown_setting")

    @classmethod
    def _explain(cls, error: ValidationError) -> ConfigurationError:
        problems = error.errors(include_url=False, include_context=False, include_input=False)
        parts = []
        for problem in problems:
            name = ".".join(str(part) for part in problem["loc"]) or "settings"
            message = problem["msg"].removeprefix("Value error, ")
            if problem["type"] == "extra_forbidden":
                parts.append(f"{name}: unknown setting; known settings: {', '.join(cls.model_fields)}")
            elif problem["loc"]:
                parts.append(
                    f"{name}: {message} (flag {flag_name(name)}, "
                    f"environment {cls.model_config.get('env_prefix')}{name.upper()})"
                )
            else:
                parts.append(message)
        field = str(problems[0]["loc"][0]) if problems[0]["loc"] else None
        return ConfigurationError("; ".join(parts) + ".", field=field)

    def for_log(self) -> dict[str, Any]:
        """Return the values to log at start-up.

        JSON logs get all values. Other logs get the values that differ from the defaults.
        """
        values = self.resolved()
        if getattr(self, "log_json", False):
            return values
        fields = type(self).model_fields
        return {
            name: one for name, one in values.items() if getattr(self, name) != fields[name].get_default()
        }

    def resolved(self) -> dict[str, Any]:
        """Return all values, with secrets masked."""
        dumped = self.model_dump(mode="json")
        return {
            name: "***" if value and ("api_key" in name or "token_secret" in name) else value
            for name, value in dumped.items()
        }


class TracedSettings(ServiceSettings):
    """Base class of the settings of services that can send traces."""

    otlp_endpoint: str = Field(
        "",
        description="Send traces to this OpenTelemetry collector (OTLP over HTTP), such as "
        "http://127.0.0.1:4318. Needs outrider[otel].",
    )
    trace_share: float = Field(
        1.0, ge=0, le=1, description="With --otlp-endpoint: share of the requests that are traced."
    )


def flag_name(field: str) -> str:
    """Return the command-line flag of a settings field."""
    return "--" + field.replace("_", "-")


def read_settings_file(path: Path) -> dict[str, Any]:
    """Read a TOML or JSON file of settings.

    Raises:
        ConfigurationError: The file cannot be read, or its content is not a table of names and values.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"Cannot read the settings file {path}: {error}.", field=str(path)) from None
    try:
        values = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except ValueError as error:
        raise ConfigurationError(
            f"The settings file {path} is not valid: {error}.", field=str(path)
        ) from None
    if not isinstance(values, dict):
        raise ConfigurationError(
            f"The settings file {path} must contain a single table of settings.", field=str(path)
        )
    return values
