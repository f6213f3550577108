"""Settings of the gateway (flags of ``serve gateway``): addresses, keys, request limits, drain times."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from outrider.services.gateway.keys.entry import KeyEntry
from outrider.services.gateway.keys.keys_file import read_keys_file
from outrider.services.gateway.parsers.registry import AUTO, REASONING_NAMES, TOOL_NAMES
from outrider.services.gateway.target_sources import TargetSource
from outrider.shared.base.errors import ConfigurationError
from outrider.shared.base.generation import SpeculationMode
from outrider.shared.base.settings import settings_config
from outrider.shared.rpc.address import is_local
from outrider.shared.rpc.peer_security import PeerSecurity, load_security
from outrider.shared.rpc.peer_settings import PeerSettings

MIB = 1024 * 1024


class GatewaySettings(PeerSettings):
    """Settings of `outrider serve gateway`."""

    model_config = settings_config("gateway")

    host: str = Field("127.0.0.1", description="Address to listen on, for REST and gRPC.")
    published_on: str = Field(
        "",
        description="Host address on which a container's ports are published. "
        "If set, this address instead of --host decides whether an API key is required.",
    )
    port: int = Field(8000, ge=0, le=65535, description="Port of the REST API. 0 chooses a free port.")
    grpc_port: int = Field(0, ge=0, le=65535, description="Port of the gRPC API. 0 turns gRPC off.")
    target: tuple[str, ...] = Field(
        ("127.0.0.1:7001",),
        description="Addresses of the targets: host:port, unix:/path, file:///path (a file with one address "
        "per line) or dns:///name:port. The gateway reads the file and the name again at intervals.",
    )
    target_refresh_s: float = Field(
        5.0, gt=0, description="Interval at which file:/// and dns:/// targets are read again."
    )
    target_wait_s: float = Field(
        15.0,
        ge=0,
        description="With several targets: longest wait for another target after a target is lost.",
    )
    target_probe_timeout_s: float = Field(
        8.0, gt=0, description="Time after which a target that does not answer a health check is not ready."
    )
    tokenizer: Path | None = Field(
        None,
        description="Folder with tokenizer.json, or the file itself. Without it, prompts must be token ids.",
    )
    model_tokenizer: tuple[str, ...] = Field(
        (),
        description="MODEL=DIR: the tokenizer of one model, if the targets serve several models. The other "
        "models use --tokenizer.",
    )
    sampling_defaults: str = Field(
        "model",
        pattern="^(model|openai)$",
        description="Source of the sampling parameters that a request leaves out. `model`: temperature, "
        "top_k, top_p, min_p and repetition_penalty come from the model's generation_config.json. "
        "`openai`: all come from OpenAI's defaults.",
    )
    speculation_mode: SpeculationMode = Field(
        SpeculationMode.AUTO,
        description="Mode of speculation of requests that name none: auto, on or off.",
    )
    served_model_name: tuple[str, ...] = Field(
        (),
        description="Model names that requests may use. Default: the target's model id. With several "
        "models, the names apply to the first target's model.",
    )
    tool_call_parser: str = Field(
        AUTO,
        pattern=f"^({'|'.join(TOOL_NAMES)})$",
        description="Format of the model's tool calls: auto (by the chat template), "
        f"{', '.join(TOOL_NAMES[1:-1])} or {TOOL_NAMES[-1]}.",
    )
    reasoning_parser: str = Field(
        AUTO,
        pattern=f"^({'|'.join(REASONING_NAMES)})$",
        description="Format of the model's reasoning: auto (by the chat template), "
        f"{', '.join(REASONING_NAMES[1:-1])} or {REASONING_NAMES[-1]}.",
    )
    any_model: bool = Field(False, description="Accept every model name in requests.")
    api_key: tuple[str, ...] = Field(
        (), description="Accepted API keys (bearer tokens). Without any, requests are not authenticated."
    )
    api_key_file: Path | None = Field(
        None, description="File of accepted API keys, one per line. Unlike --api-key, it shows no key in ps."
    )
    api_keys_file: Path | None = Field(
        None,
        description="TOML or JSON file of API keys with names, limits and permissions: docs/security.md. "
        "The gateway reloads a changed file.",
    )
    admin_api_key_file: Path | None = Field(
        None,
        description="File of admin keys, one per line. If set, keys of --api-key and --api-key-file may not "
        "call the routes for operators.",
    )
    tls_cert: Path | None = Field(
        None, description="PEM certificate of the gateway. REST and gRPC then accept only TLS."
    )
    tls_key: Path | None = Field(None, description="PEM private key of --tls-cert.")
    tls_ca: Path | None = Field(
        None,
        description="PEM certificates of an authority. If set, clients need a certificate signed by it.",
    )
    cors_origins: tuple[str, ...] = Field(
        (),
        description="Origins whose web pages may call the gateway, such as https://example.com, or *.",
    )
    allow_unauthenticated: bool = Field(
        False, description="Allow access from other hosts without an API key."
    )
    public_metrics: bool = Field(False, description="Serve /metrics without an API key.")
    playground: bool = Field(
        True,
        description="Serve the playground at / and the operator's page at /status. The pages need no "
        "API key, but if keys are set, the requests that the pages send need one.",
    )
    max_queued_requests: int = Field(
        512,
        ge=1,
        description="Maximum number of sequences that wait for their first token. Further ones get 429.",
    )
    max_queued_prompt_tokens: int = Field(
        1_000_000,
        ge=1,
        description="Maximum number of prompt tokens of waiting sequences. Further requests get 429.",
    )
    max_queue_wait_s: float | None = Field(
        None,
        ge=0,
        description="Maximum expected time until the first token. Requests that would wait longer get 429. "
        "0: no limit. By default, the queue is limited while it keeps growing.",
    )
    max_connections: int = Field(
        0,
        ge=0,
        description="Maximum number of REST connections. 0: as many as the limit of open files allows.",
    )
    head_timeout_s: float = Field(
        10.0,
        gt=0,
        description="Time after which a connection without complete TLS handshake or request head is closed.",
    )
    unread_timeout_s: float = Field(
        30.0,
        gt=0,
        description="Time for which a client may read nothing of a reply before its connection is closed. "
        "For streams, this time follows --slow-reader-timeout-s.",
    )
    max_body_bytes: int = Field(8 * MIB, ge=1024, description="Maximum size of a request body.")
    max_choices: int = Field(16, ge=1, le=1024, description="Maximum n of a request.")
    max_batch: int = Field(512, ge=1, le=4096, description="Maximum number of prompts in a request.")
    max_stop_strings: int = Field(
        32, ge=1, le=1024, description="Maximum number of stop strings, and of stop regexes, of a request."
    )
    max_stop_chars: int = Field(
        1024, ge=1, le=65536, description="Maximum length of a stop string or stop regex."
    )
    max_state_bytes: int = Field(
        16 * MIB,
        ge=0,
        description="Maximum size of the hidden states and routed experts in a reply, at 4 bytes per number.",
    )
    max_messages: int = Field(1024, ge=1, le=4096, description="Maximum number of messages in a chat.")
    request_timeout_s: float = Field(
        600.0, gt=0, description="Maximum duration of a request. Clients can set a shorter deadline."
    )
    keep_alive_s: float = Field(
        10.0, gt=0, description="While a stream has no new tokens: interval of comment lines."
    )
    slow_reader_timeout_s: float = Field(
        30.0, gt=0, description="Time for which a client may read nothing before its stream is aborted."
    )
    slow_reader_bytes: int = Field(
        64 * 1024, ge=1024, description="Pause a sequence when its stream has this many unread bytes."
    )
    drain_notice_s: float = Field(
        0.0, ge=0, description="On SIGTERM: delay between reporting not ready and refusing new requests."
    )
    drain_grace_s: float = Field(30.0, ge=0, description="On SIGTERM: time for running requests to finish.")
    log_level: str = Field(
        "info",
        pattern="^(debug|info|warning|error)$",
        description="Log level: debug, info, warning or error.",
    )
    log_json: bool = Field(False, description="Write each log line as a JSON object.")

    def check(self) -> None:
        """Check rules that involve several settings.

        Raises:
            ConfigurationError: If an address is malformed, or if other hosts could send requests without a
                key.
        """
        if not self.sources:
            raise ConfigurationError("target: Give the address of at least one target.", field="target")
        for source in self.sources:
            source.check()
        self.tokenizers  # noqa: B018  # raises if an entry is malformed
        field, address = ("published_on", self.published_on) if self.published_on else ("host", self.host)
        if not is_local(address) and not self.guarded and not self.allow_unauthenticated:
            fix = "publish on 127.0.0.1 (under compose: set OUTRIDER_API_KEY, or unset OUTRIDER_BIND)"
            raise ConfigurationError(
                f"{field}: {address} is reachable from other hosts, but there is no API key. "
                "Set OUTRIDER_GATEWAY_API_KEY, --api-keys-file, --api-key-file or --api-key, "
                f"{fix if self.published_on else 'listen on 127.0.0.1'}, "
                "or pass --allow-unauthenticated.",
                field=field,
            )
        if any(not key.isascii() or not key.strip() for key in self.api_key):
            raise ConfigurationError("api_key: Keys must be non-empty ASCII text.", field="api_key")
        self.peer_security()
        self.front_security()
        self.fixed_keys()
        if self.api_keys_file is not None:
            read_keys_file(self.api_keys_file)

    @property
    def sources(self) -> tuple[TargetSource, ...]:
        """Where the addresses of the targets come from."""
        entries = [entry.strip() for one in self.target for entry in one.split(",")]
        return tuple(TargetSource(entry) for entry in entries if entry)

    @property
    def tokenizers(self) -> dict[str, Path]:
        """The folder of each tokenizer that belongs to one particular model, by model id.

        Raises:
            ConfigurationError: If an entry of `model_tokenizer` does not have the format MODEL=DIR.
        """
        pairs = [one.partition("=")[::2] for one in self.model_tokenizer]
        if not all(name and folder for name, folder in pairs):
            raise ConfigurationError(
                "model_tokenizer: Each entry must be MODEL=DIR, such as llama-8b=/models/llama-8b.",
                field="model_tokenizer",
            )
        return {name: Path(folder) for name, folder in pairs}

    def front_security(self) -> PeerSecurity:
        """Read the certificates and the key that the gateway uses for connections from its clients.

        Raises:
            ConfigurationError: If a file cannot be read or is invalid, or if other users can read the key.
        """
        if self.tls_ca is not None and self.tls_cert is None:
            raise ConfigurationError("tls_ca: set tls_cert and tls_key, too.", field="tls_ca")
        return load_security(self.tls_cert, self.tls_key, self.tls_ca, None, prefix="")

    @property
    def guarded(self) -> bool:
        """Whether requests need an API key."""
        files = (self.api_key_file, self.api_keys_file, self.admin_api_key_file)
        return bool(self.api_key) or any(file is not None for file in files)

    def fixed_keys(self) -> tuple[KeyEntry, ...]:
        """Return the API keys from all settings except the keys file. These keys have no limits.

        Raises:
            ConfigurationError: If a file cannot be read or contains no key.
        """
        admin_keys = _read_lines(self.admin_api_key_file, "admin_api_key_file")
        keys = dict.fromkeys((*self.api_key, *_read_lines(self.api_key_file, "api_key_file")))
        users = [key for key in keys if key not in admin_keys]
        return (
            *(
                KeyEntry.unlimited(f"key-{number}", key, admin=self.admin_api_key_file is None)
                for number, key in enumerate(users, 1)
            ),
            *(
                KeyEntry.unlimited(f"admin-{number}", key, admin=True)
                for number, key in enumerate(dict.fromkeys(admin_keys), 1)
            ),
        )


def _read_lines(file: Path | None, field: str) -> tuple[str, ...]:
    """Return the keys in a file with one key per line. Without a file, return an empty tuple."""
    if file is None:
        return ()
    try:
        lines = file.read_text(encoding="ascii").splitlines()
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            f"{field}: {file} cannot be read as ASCII text: {error}.", field=field
        ) from None
    keys = tuple(line.strip() for line in lines if line.strip())
    if not keys:
        raise ConfigurationError(f"{field}: {file} has no key.", field=field)
    return keys
