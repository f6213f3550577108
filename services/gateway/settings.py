"""What the gateway can be told."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from outrider.shared.base.errors import ConfigurationError
from outrider.shared.base.settings import ServiceSettings, settings_config
from outrider.shared.rpc.address import check_address, is_local

MIB = 1024 * 1024


class GatewaySettings(ServiceSettings):
    """Settings of `outrider serve gateway`."""

    model_config = settings_config("gateway")

    host: str = Field("127.0.0.1", description="Address to listen on, REST and gRPC.")
    published_on: str = Field(
        "",
        description="Address under which a container's host publishes the ports; who reaches them decides, not --host.",
    )
    port: int = Field(8000, ge=0, le=65535, description="Port of the REST API; 0 picks one.")
    grpc_port: int = Field(0, ge=0, le=65535, description="Port of the gRPC API; 0: none.")
    target: str = Field("127.0.0.1:7001", description="The target service: host:port or unix:/path.")
    tokenizer: Path | None = Field(
        None, description="Folder with tokenizer.json (or the file itself). Without: token ids only."
    )
    served_model_name: tuple[str, ...] = Field(
        (), description="Names that requests may use; by default the target's own."
    )
    any_model: bool = Field(False, description="Serve requests whatever model they name.")
    api_key: tuple[str, ...] = Field(
        (), description="Accepted bearer tokens; without any, requests are not authenticated."
    )
    allow_unauthenticated: bool = Field(
        False, description="Let other hosts reach the gateway without an API key."
    )
    public_metrics: bool = Field(False, description="Serve /metrics without an API key.")
    max_queued_requests: int = Field(
        512, ge=1, description="Sequences that may wait for their first token; more get 429."
    )
    max_queued_prompt_tokens: int = Field(
        1_000_000, ge=1, description="Prompt tokens of waiting sequences; more get 429."
    )
    max_body_bytes: int = Field(MIB, ge=1024, description="Largest request body.")
    max_choices: int = Field(16, ge=1, le=1024, description="Largest n.")
    max_batch: int = Field(64, ge=1, le=4096, description="Most prompts of one request.")
    max_messages: int = Field(1024, ge=1, description="Most messages of one chat.")
    request_timeout_s: float = Field(600.0, gt=0, description="Deadline of requests that bring none.")
    keep_alive_s: float = Field(10.0, gt=0, description="Silence after which a stream gets a comment line.")
    slow_reader_timeout_s: float = Field(
        30.0, gt=0, description="A stream that nobody reads for this long is aborted."
    )
    slow_reader_bytes: int = Field(
        64 * 1024, ge=1024, description="Unread bytes of a stream after which the target skips it."
    )
    drain_notice_s: float = Field(
        0.0, ge=0, description="On SIGTERM: time between not ready and refusing new requests."
    )
    drain_grace_s: float = Field(
        30.0, ge=0, description="On SIGTERM: time that running requests get to finish."
    )
    log_level: str = Field(
        "info", pattern="^(debug|info|warning|error)$", description="debug, info, warning or error."
    )
    log_json: bool = Field(False, description="One JSON object per log line.")

    def check(self) -> None:
        """Check what concerns several fields.

        Raises:
            ConfigurationError: an address is malformed, or the gateway would be open to other hosts without a key.
        """
        check_address(self.target, "target")
        field, address = ("published_on", self.published_on) if self.published_on else ("host", self.host)
        if not is_local(address) and not self.api_key and not self.allow_unauthenticated:
            fix = "publish on 127.0.0.1 (under compose: set OUTRIDER_API_KEY, or leave OUTRIDER_BIND alone)"
            raise ConfigurationError(
                f"{field}: {address} is reachable from other hosts and no --api-key is set. "
                f"Set one, {fix if self.published_on else 'listen on 127.0.0.1'}, or pass --allow-unauthenticated.",
                field=field,
            )
        if any(not key.isascii() or not key.strip() for key in self.api_key):
            raise ConfigurationError("api_key: keys are non-empty ASCII text.", field="api_key")
