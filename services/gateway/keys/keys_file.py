"""Reads the file of API keys: TOML or JSON with one table per key.

Errors name the line or the field of the file. No error contains a value from the file, because the value
could be a key.
"""

from __future__ import annotations

import json
import os
import stat
import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from outrider.services.gateway.keys.entry import KeyEntry, digest_of
from outrider.shared.base.errors import ConfigurationError
from outrider.shared.base.generation import SpeculationMode

MAX_KEYS = 1000
MAX_FILE_BYTES = 1 << 20
MIN_KEY_CHARS = 16
Priority = Annotated[int, Field(ge=-(1 << 31), lt=1 << 31)]
Limit = Annotated[int, Field(ge=1, lt=1 << 53)]


class _Row(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, hide_input_in_errors=True)

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")
    key: str | None = Field(None, min_length=MIN_KEY_CHARS, max_length=512, pattern=r"^[\x21-\x7e]+$")
    key_sha256: str | None = Field(None, pattern=r"^[0-9a-fA-F]{64}$")
    requests_per_minute: Limit | None = None
    tokens_per_minute: Limit | None = None
    max_concurrent: Limit | None = None
    priority: list[Priority] = Field([0, 0], min_length=2, max_length=2)
    speculation: list[Literal["auto", "on", "off"]] = Field(["auto", "on", "off"], min_length=1)
    models: list[str] | None = Field(None, min_length=1, max_length=64)
    admin: bool = False
    cache_salt: str = Field("", max_length=128)

    @field_validator("priority")
    @classmethod
    def _in_order(cls, value: list[int]) -> list[int]:
        if value[0] > value[1]:
            raise ValueError("the first number, the lowest priority, must not exceed the second")
        return value

    @model_validator(mode="after")
    def _one_key(self) -> _Row:
        if (self.key is None) == (self.key_sha256 is None):
            raise ValueError("set exactly one of key and key_sha256")
        return self

    def entry(self) -> KeyEntry:
        """Return the entry that the gateway uses."""
        return KeyEntry(
            name=self.name,
            digest=digest_of(self.key) if self.key else bytes.fromhex(self.key_sha256 or ""),
            requests_per_minute=self.requests_per_minute,
            tokens_per_minute=self.tokens_per_minute,
            max_concurrent=self.max_concurrent,
            priority=(self.priority[0], self.priority[1]),
            modes=tuple(SpeculationMode(mode) for mode in self.speculation),
            models=None if self.models is None else frozenset(self.models),
            admin=self.admin,
            cache_salt=self.cache_salt,
        )


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, hide_input_in_errors=True)

    keys: list[_Row] = Field(min_length=1, max_length=MAX_KEYS)


def read_keys_file(path: Path) -> tuple[KeyEntry, ...]:
    """Return the entries of a file of API keys.

    A file whose name ends with ``.json`` contains JSON. Any other file contains TOML.

    Raises:
        ConfigurationError: If the file cannot be read, if other users could change it or read its keys, or if
            its content is invalid. The message names the line or the field.
    """
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            content = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise _bad(path, f"cannot be read: {error.strerror}") from None
    if len(content) > MAX_FILE_BYTES:
        raise _bad(path, f"is larger than {MAX_FILE_BYTES} bytes")
    if mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise _bad(path, "can be changed by other users. Run: chmod go-w")
    table = _parse(path, content)
    try:
        rows = _File.model_validate(table).keys
    except ValidationError as error:
        raise _bad(path, _explain(error)) from None
    if mode & stat.S_IROTH and any(row.key or row.cache_salt for row in rows):
        raise _bad(path, "contains keys or salts that all users can read. Run: chmod o-r, or use key_sha256")
    entries = tuple(row.entry() for row in rows)
    refuse_duplicates(entries, str(path))
    return entries


def refuse_duplicates(entries: tuple[KeyEntry, ...], source: str) -> None:
    """Raise ConfigurationError if two entries have the same name or the same key."""
    names: set[str] = set()
    owners: dict[bytes, str] = {}
    for entry in entries:
        if entry.name in names:
            raise ConfigurationError(
                f"api_keys_file: {source} has two keys with the name {entry.name!r}.", field="api_keys_file"
            )
        names.add(entry.name)
        if (owner := owners.setdefault(entry.digest, entry.name)) != entry.name:
            raise ConfigurationError(
                f"api_keys_file: {source}: {owner!r} and {entry.name!r} have the same key.",
                field="api_keys_file",
            )


def _parse(path: Path, content: bytes) -> Any:
    try:
        text = content.decode("utf-8")
        return json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except UnicodeDecodeError:
        raise _bad(path, "is not UTF-8 text") from None
    except RecursionError:
        raise _bad(path, "is nested too deeply") from None
    except json.JSONDecodeError as error:
        raise _bad(path, f"is not valid JSON: {error.msg} (line {error.lineno})") from None
    except ValueError as error:
        # tomllib's messages can quote the file. They end with the line and the column, in parentheses.
        place = str(error).rpartition("(")[2].rstrip(")")
        raise _bad(path, f"is not valid TOML ({place})") from None


def _explain(error: ValidationError) -> str:
    problem = error.errors(include_url=False, include_context=False, include_input=False)[0]
    field = ".".join(str(part) for part in problem["loc"])
    message = str(problem["msg"]).removeprefix("Value error, ")
    if problem["type"] == "extra_forbidden":
        message = f"there is no such field. Fields of a key: {', '.join(_Row.model_fields)}"
    return f"{field or 'the file'}: {message}"


def _bad(path: Path, problem: str) -> ConfigurationError:
    return ConfigurationError(f"api_keys_file: {path}: {problem}.", field="api_keys_file")
