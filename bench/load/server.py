"""The server that a load is sent to: its model, its limits, and errors that say how to avoid a refusal."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import httpx

from outrider.services.clients.rest import gateway_url
from outrider.services.clients.server_trust import server_trust, tls_failure
from outrider.shared.base.errors import ConfigurationError, OutriderError, UnavailableError

OUTRIDER = "outrider"
"""Owner of the models that Outrider's gateway lists."""
QUOTED_CHARS = 300
CHAT_TEMPLATE = re.compile(r"chat[ _]template", re.IGNORECASE)
LENGTH = re.compile(r"context|too long|max(?:imum)?[ _](?:model[ _])?len|maximum.*tokens", re.IGNORECASE)
VOCABULARY = re.compile(r"vocab|token[ _]ids? .*(?:range|bounds)", re.IGNORECASE)
NEEDED = ("input_ids", "messages", "model", "prompt", "sampling_params", "stream")
RETRIED = (408, 429)
"""Statuses below 500 that a later request may not get."""


@dataclass(frozen=True, slots=True)
class Server:
    """The properties that a server reports about itself.

    Attributes:
        url: Address of the server, without ``/v1``.
        model: Id of the first model that the server lists.
        owner: `owned_by` of that model, such as ``outrider`` or ``vllm``.
        max_model_len: Largest number of tokens of a prompt and its answer. None if the server does not report
            it.
        vocab_size: Number of token ids. None if the server does not report it.
        max_running: Largest number of requests that run at the same time. None if the server does not report
            it.
        draft_state: The state of Outrider's draft, or ``none`` if there is no draft. Empty for other servers.
        shape_limits: The limits of an Outrider server on `depth`, `topk` and `max_nodes`. Empty for other
            servers.
    """

    url: str
    model: str
    owner: str = ""
    max_model_len: int | None = None
    vocab_size: int | None = None
    max_running: int | None = None
    draft_state: str = ""
    shape_limits: Mapping[str, int] = field(default_factory=dict)

    @property
    def is_outrider(self) -> bool:
        """True if the server is an Outrider gateway."""
        return self.owner == OUTRIDER

    def as_json(self) -> dict[str, Any]:
        """Return what identifies the server in a result."""
        return {
            "model": self.model,
            "owner": self.owner,
            "max_model_len": self.max_model_len,
            "vocab_size": self.vocab_size,
            "max_running_requests": self.max_running,
            "draft_state": self.draft_state or None,
        }


def server_address(url: str) -> str:
    """Return a server's address with a scheme, and without a trailing ``/`` or ``/v1``.

    Raises:
        ConfigurationError: The text is not an address of an HTTP server.
    """
    address = gateway_url(url)
    try:
        parts = urlsplit(address)
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        valid = False
    if not valid:
        raise ConfigurationError(
            f"--url {url}: expected an address such as http://127.0.0.1:8000.", field="--url"
        )
    return address


def find_server(url: str, api_key: str | None) -> Server:
    """Query the server at `url` for its model and, if the server is Outrider, for its limits.

    Raises:
        ConfigurationError: The address is malformed, the key is refused, or the server has no OpenAI API.
        UnavailableError: No server answers at the address, or its certificate is not accepted.
    """
    address = server_address(url)
    with httpx.Client(
        base_url=address,
        headers=key_headers(api_key),
        timeout=10.0,
        trust_env=False,
        verify=server_trust(address),
    ) as http:
        try:
            listed = http.get("/v1/models")
        except httpx.TransportError as error:
            raise tls_failure(error, address) or UnavailableError(
                f"--url {url}: no server answers. Start one, for example with `outrider up`, or give another "
                "--url.",
                field="--url",
            ) from None
        if listed.status_code in (401, 403):
            raise _wrong_key(listed.status_code)
        models = _json_object(listed).get("data")
        if listed.status_code != httpx.codes.OK or not isinstance(models, list) or not models:
            raise ConfigurationError(
                f"--url {url}: {listed.status_code} and no model from /v1/models. Give the --url of a server "
                "with OpenAI's API.",
                field="--url",
            )
        first = models[0] if isinstance(models[0], dict) else {}
        owner = str(first.get("owned_by") or "")
        info = _json_object(http.get("/model_info")) if owner == OUTRIDER else {}
        state = _json_object(http.get("/server_info")) if owner == OUTRIDER else {}
    engine = (state.get("internal_states") or [{}])[0]
    limits = {
        name: int(state[f"speculative_max_{key}"])
        for name, key in (("depth", "steps"), ("topk", "topk"), ("max_nodes", "nodes"))
        if state.get(f"speculative_max_{key}")
    }
    return Server(
        address,
        str(first.get("id") or ""),
        owner,
        _whole(first.get("max_model_len")),
        _whole(info.get("vocab_size")),
        _whole(state.get("max_running_requests")),
        str(engine.get("draft_state") or ""),
        limits,
    )


def key_headers(api_key: str | None) -> dict[str, str]:
    """Return the headers that send the API key, if there is one."""
    return {"authorization": f"Bearer {api_key}"} if api_key else {}


def refusal(status: int, text: str, fields: Iterable[str], lengths: str, route: str) -> OutriderError:
    """Return the error for a reply whose HTTP status is not 200.

    For a refused request, the error is a `ConfigurationError` that names the option to change. For any other
    reply, it is an `UnavailableError`. The server is then overloaded or broken, and the request may succeed
    later.

    Args:
        status: HTTP status.
        text: Body of the reply.
        fields: Names of the fields in the request.
        lengths: Options that set the lengths of prompts and answers, for the message.
        route: Option that chooses the route.
    """
    quoted = f"{status}: {' '.join(text.split())[:QUOTED_CHARS]}"
    if status >= 500 or status in RETRIED:
        return UnavailableError(quoted, field="--url")
    if status in (401, 403):
        return _wrong_key(status)
    if status in (404, 405):
        return ConfigurationError(
            f"The server has no such route ({quoted}). Choose another {route}.", field=route
        )
    if CHAT_TEMPLATE.search(text):
        return ConfigurationError(
            f"The server has no chat template ({quoted}). Send text with {route} completions.", field=route
        )
    if VOCABULARY.search(text):
        return ConfigurationError(
            f"The server refused a token id ({quoted}). Set --vocab to the model's vocabulary size.",
            field="--vocab",
        )
    if LENGTH.search(text) or status == httpx.codes.REQUEST_ENTITY_TOO_LARGE:
        return ConfigurationError(
            f"The server refused a length ({quoted}). Lower {lengths}.",
            field=lengths.split(",")[0].split()[0],
        )
    if (name := _refused_field(text, fields)) is not None:
        return ConfigurationError(
            f"The server refused the field {name} ({quoted}). Leave the field out with --omit {name}.",
            field="--omit",
        )
    return ConfigurationError(
        f"The server refused a request ({quoted}). If it does not know a field, leave the field out with "
        "--omit.",
        field="--omit",
    )


def _wrong_key(status: int) -> ConfigurationError:
    return ConfigurationError(
        f"The server answered {status}: it requires another API key. Give it with --api-key.",
        field="--api-key",
    )


def _refused_field(text: str, fields: Iterable[str]) -> str | None:
    """Return the request's field that an error names in `param` or, failing that, first in its text.

    Fields that every request needs are never returned.
    """
    try:
        body = json.loads(text)
    except ValueError:
        body = None
    error = body.get("error", body) if isinstance(body, dict) else None
    named = str(error.get("param") or "") if isinstance(error, dict) else ""
    known = [name for name in fields if name not in NEEDED]
    if (last := named.rpartition(".")[2]) in known:
        return last
    return next((name for name in known if re.search(rf"\b{re.escape(name)}\b", text)), None)


def _json_object(response: httpx.Response) -> dict[str, Any]:
    try:
        body = response.json()
    except ValueError:
        return {}
    return body if isinstance(body, dict) else {}


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None
