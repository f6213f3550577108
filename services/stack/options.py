"""The options of `outrider up`, and the paths of the embedded model pair."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from outrider.shared.spec.algorithm import Algorithm

# The folder that holds services/, models/ and bench/ side by side, in a checkout and in an installed package alike.
PACKAGE_ROOT = Path(__file__).resolve().parents[2]
DEMO_TARGET = PACKAGE_ROOT / "models" / "demo" / "target"
DEMO_DRAFT = PACKAGE_ROOT / "models" / "demo" / "eagle3"

INPROC = "inproc:"
"""`--draft inproc:DIR` of the target: the draft lives in its process."""


class Transport(Enum):
    """How the target reaches the draft."""

    AUTO = "auto"
    GRPC = "grpc"
    IPC = "ipc"
    INPROC = "inproc"


@dataclass(frozen=True, slots=True)
class StackOptions:
    """What `outrider up` was asked for. None: the service's own default.

    Attributes:
        target: Model folder, Hugging Face layout.
        draft: Folder of the draft head or draft model, or None.
        algorithm: How to draft. AUTO without a draft serves without speculation.
        token_map: File of the token ids to draft; None = all of them.
        ngram_corpus: File of further texts for n-grams.
        device, dtype: As the services take them.
        num_steps, topk, num_draft_tokens: Tree shape when a request names none.
        max_steps, max_topk, max_nodes: Caps of the shape that a request may name.
        host, port: The gateway's REST address; gRPC listens on the next port.
        skip_tokenizer: Token ids only.
        transport: AUTO takes the draft into the target's process on a machine with one GPU, else a process of its own.
        kv_tokens: Size of the KV caches in tokens, of target and draft alike, for several stacks on one GPU.
        max_running_requests: Sequences that the target works on at once, and that the draft follows if they are more than its default.
        mem_fraction_static: Share of the GPU's memory for weights and KV cache, the draft's included.
        mps: Share the GPU by the multi-process service; the draft then has a process of its own.
        tp: GPUs (processes, on a CPU) that share the target. AUTO transport then takes the draft into the target's first process.
        target_flags: Further settings that only the target reads, by their names.
    """

    target: Path = DEMO_TARGET
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
    log_level: str = "info"
    kv_tokens: int | None = None
    max_running_requests: int | None = None
    mem_fraction_static: float | None = None
    tp: int | None = None
    mps: bool = False
    target_flags: Mapping[str, object] = field(default_factory=dict)

    @property
    def speculates(self) -> bool:
        """Whether anything drafts."""
        if self.algorithm is Algorithm.NONE:
            return False
        return self.draft is not None or not self.algorithm.needs_draft
