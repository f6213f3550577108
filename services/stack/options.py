"""Defines the options of `outrider up`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from outrider.services.hub.pair import DEMO_DRAFT, DEMO_TARGET
from outrider.shared.spec.algorithm import Algorithm

INPROC = "inproc:"
"""Prefix of a value of the target's flag, as in ``--draft inproc:DIR``. The draft in DIR then runs in the
target's process."""


class Transport(Enum):
    """How the target reaches the draft."""

    AUTO = "auto"
    GRPC = "grpc"
    IPC = "ipc"
    INPROC = "inproc"


@dataclass(frozen=True, slots=True)
class StackOptions:
    """Options of `outrider up`. If an option is None, the service uses its own default.

    Attributes:
        target: Model folder in Hugging Face layout.
        model_id: Name of the model for clients. None uses the folder's name.
        draft: Folder of the draft head or draft model, or None.
        algorithm: Drafting method. With AUTO and no draft, the stack serves without speculation.
        token_map: File of the token ids that the draft may propose (FR-Spec). None allows all ids.
        ngram_corpus: File with additional texts for n-gram drafting.
        device, dtype: Device and data type, in the services' notation.
        num_steps, topk, num_draft_tokens: Shape of the draft tree for requests that specify none.
        max_steps, max_topk, max_nodes: Limits on the shape that a request may specify.
        host, port: REST address of the gateway. By default, the gRPC API listens on the next port.
        skip_tokenizer: True to serve token ids only, without a tokenizer.
        transport: How the target connects to the draft. If AUTO, `placement.place_draft` decides.
        why_transport: Reason for the transport, for the log. If empty, the log names the flag --transport.
        draft_device: Device of a draft with its own process. With `auto`, an idle GPU is preferred.
        kv_tokens: Size of the KV cache in tokens, for the target and the draft alike. Needed to run several
            stacks on one GPU.
        max_running_requests: Number of sequences that the target runs at the same time. If this number
            exceeds the draft's default session limit, that limit is raised to the same number.
        mem_fraction_static: Fraction of GPU memory for the weights and KV caches of the target and the draft.
        mps: True to share the GPU through NVIDIA's multi-process service. The draft then has its own process.
        tp: Number of GPUs, or of processes on a CPU, among which the target is split. With AUTO transport,
            the draft then runs in the target's first process.
        standby: True to keep a standby process that takes over if the draft's own process exits.
        target_settings: Settings that only the target reads, by setting name.
        gateway_settings: Settings that `up` passes to the gateway, by setting name.
        grpc_port: Port of the gRPC API. 0 disables the API. None selects the port after `port`.
        log_json: True to write the log lines of all services as JSON.
    """

    target: Path = DEMO_TARGET
    model_id: str | None = None
    draft: Path | None = DEMO_DRAFT
    algorithm: Algorithm = Algorithm.AUTO
    token_map: Path | None = None
    ngram_corpus: Path | None = None
    device: str = "auto"
    dtype: str = "auto"
    num_steps: int | None = None
    topk: int | None = None
    num_draft_tokens: int | None = None
    max_steps: int | None = None
    max_topk: int | None = None
    max_nodes: int | None = None
    host: str = "127.0.0.1"
    port: int = 8000
    skip_tokenizer: bool = False
    transport: Transport = Transport.AUTO
    why_transport: str = ""
    draft_device: str = "auto"
    log_level: str = "info"
    kv_tokens: int | None = None
    max_running_requests: int | None = None
    mem_fraction_static: float | None = None
    tp: int | None = None
    mps: bool = False
    standby: bool = True
    target_settings: Mapping[str, object] = field(default_factory=dict)
    gateway_settings: Mapping[str, object] = field(default_factory=dict)
    grpc_port: int | None = None
    log_json: bool = False

    @property
    def grpc(self) -> int:
        """Port of the gRPC API; 0 if it is disabled."""
        return self.port + 1 if self.grpc_port is None else self.grpc_port

    @property
    def speculates(self) -> bool:
        """True if the stack speculates, with or without a draft folder."""
        if self.algorithm is Algorithm.NONE:
            return False
        return self.draft is not None or not self.algorithm.needs_draft
