"""What the draft can be told, and how it becomes a plan for the machine at hand."""

from __future__ import annotations

from enum import Enum
from pathlib import Path

import torch
from pydantic import Field

from outrider.services.draft.algorithm import Algorithm, check_given
from outrider.shared.attn.create import AttentionKind
from outrider.shared.base.errors import ConfigurationError
from outrider.shared.base.settings import ServiceSettings, settings_config
from outrider.shared.rpc.address import check_listen_address, grpc_address
from outrider.shared.spec.tree import DraftShape

CPU_KV_TOKENS = 64 * 1024
CPU_KV_BYTES = 1 << 30
FREE_SHARE = 0.1
"""Of what a GPU has free that may be the target's too: the most that a cache takes unasked."""
SESSION_TOKENS = 16 * 1024
"""For each session at most so many on average, about a target's on a large GPU (848K tokens of 8B on an H200, 64 sessions)."""
SMALL_HEAD = 1024
"""Hidden size up to which a head's operations are too short to be worth sharing among threads."""


class Dtype(Enum):
    """Type of weights and activations; AUTO is fp32 on the CPU and bf16 on CUDA."""

    AUTO = "auto"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


class DraftSettings(ServiceSettings):
    """Settings of `outrider serve draft`."""

    model_config = settings_config("draft")

    listen: str = Field(
        "127.0.0.1:7002",
        description="Address of the service: host:port, unix:/path, or ipc:///path for a target of this host.",
    )
    insecure: bool = Field(
        False, description="Listen on addresses that other hosts reach, without authentication."
    )
    draft: Path | None = Field(
        None,
        description="Folder of the draft head or draft model; none for n-grams or the target's MTP layers.",
    )
    target_weights: Path | None = Field(
        None, description="Target's folder: borrowed tensors, MTP layers and the tokenizer are read from it."
    )
    speculative_algorithm: Algorithm = Field(
        Algorithm.AUTO,
        description="EAGLE, EAGLE3, MTP (or NEXTN), STANDALONE, NGRAM, NONE, or auto: what the checkpoint shows.",
    )
    speculative_token_map: Path | None = Field(
        None,
        description="FR-Spec: the frequent tokens to draft, .pt, .safetensors or .json of ids; for heads with a full vocabulary.",
    )
    ngram_min_match: int = Field(1, ge=1, description="NGRAM: tokens of context that must agree.")
    ngram_max_match: int = Field(12, ge=1, description="NGRAM: tokens of context that can at most count.")
    ngram_corpus: Path | None = Field(
        None, description="NGRAM: further texts, .json or .jsonl of token ids or texts, or a text a line."
    )
    device: str = Field(
        "auto", pattern="^(auto|cpu|cuda(:[0-9]+)?)$", description="auto, cpu, cuda or cuda:N."
    )
    dtype: Dtype = Field(Dtype.AUTO, description="auto, float32, bfloat16 or float16.")
    attention_backend: AttentionKind = Field(AttentionKind.AUTO, description="auto, reference or triton.")
    disable_tile_trial: bool = Field(
        False, description="Try no tiles of products at start, and use none of earlier trials."
    )
    max_sessions: int = Field(64, ge=1, description="Sequences that are followed at once.")
    max_steps: int = Field(16, ge=1, description="Deepest tree that a target may ask for.")
    max_topk: int = Field(16, ge=1, description="Widest branching that a target may ask for.")
    max_nodes: int = Field(128, ge=1, description="Largest tree that a target may ask for.")
    num_steps: int = Field(
        5, ge=1, description="Depth of the trees that are recorded at start: the target's own default."
    )
    topk: int = Field(4, ge=1, description="Branching of these trees.")
    num_draft_tokens: int = Field(16, ge=1, description="Nodes of these trees, the root included.")
    cuda_graph_max_bs: int = Field(
        64, ge=1, description="Largest batch that CUDA graphs are recorded for; larger ones run without."
    )
    disable_cuda_graph: bool = Field(
        False, description="Record no CUDA graphs; every round is launched kernel by kernel."
    )
    page_size: int = Field(16, ge=1, le=1024, description="Tokens per page of the draft's KV cache.")
    kv_tokens: int | None = Field(
        None, ge=1, description="Size of the draft's KV cache in tokens; by default what the memory allows."
    )
    mem_fraction_static: float | None = Field(
        None,
        gt=0,
        lt=1,
        description="Share of the GPU's memory for weights and KV cache; by default the cache gets a tenth of what is free.",
    )
    threads: int | None = Field(
        None,
        ge=1,
        description="CPU threads of the draft; by default 1 for a small one, else torch's own choice.",
    )
    lease_s: float = Field(10.0, gt=0, description="A target that is silent for so long loses its sessions.")
    evict_idle_s: float = Field(
        1.0, ge=0, description="A session that was idle for so long may make room for another."
    )
    drain_grace_s: float = Field(
        2.0, ge=0, description="On SIGTERM: time that the step in hand gets to finish."
    )
    log_level: str = Field(
        "info", pattern="^(debug|info|warning|error)$", description="debug, info, warning or error."
    )
    log_json: bool = Field(False, description="One JSON object per log line.")

    def check(self) -> None:
        """Check what concerns several fields or the machine.

        Raises:
            ConfigurationError: names the field and the fix.
        """
        check_listen_address(grpc_address(self.listen, "listen"), "listen", allow_remote=self.insecure)
        check_given(self.speculative_algorithm, self.draft, self.target_weights)
        if self.ngram_corpus is not None and self.speculative_algorithm is not Algorithm.NGRAM:
            raise ConfigurationError(
                f"ngram_corpus: {self.ngram_corpus} is read by NGRAM only; ask for --speculative-algorithm NGRAM, or leave it out.",
                field="ngram_corpus",
            )
        if self.ngram_min_match > self.ngram_max_match:
            raise ConfigurationError(
                f"ngram_min_match = {self.ngram_min_match} is above ngram_max_match = {self.ngram_max_match}.",
                field="ngram_min_match",
            )
        if self.attention_backend is AttentionKind.FLASHINFER:
            raise ConfigurationError(
                "attention_backend: flashinfer waits for the GPU, drafts must not; use auto, reference or triton.",
                field="attention_backend",
            )
        if self.mem_fraction_static is not None and self.torch_device().type == "cpu":
            raise ConfigurationError(
                f"mem_fraction_static = {self.mem_fraction_static} would do nothing: on a CPU kv_tokens sizes the cache; leave it out.",
                field="mem_fraction_static",
            )
        if self.device.startswith("cuda") and not torch.cuda.is_available():
            raise ConfigurationError(
                "device: cuda was asked for and torch sees no GPU here; use --device cpu.", field="device"
            )

    def sized(self, kv_tokens: int) -> DraftSettings:
        """Return the settings with a cache of so many tokens (and at least one largest tree), unless they name its size."""
        if self.kv_tokens is not None:
            return self
        return self.model_copy(
            update={"kv_tokens": max(kv_tokens, self.max_topk * self.max_steps + self.page_size)}
        )

    def max_shape(self) -> DraftShape:
        """Return the largest tree that may be asked for."""
        return DraftShape(self.max_steps, self.max_topk, self.max_nodes)

    def usual_shape(self) -> DraftShape:
        """Return the tree of a request that names none, no larger than `max_shape`."""
        steps, topk = min(self.num_steps, self.max_steps), min(self.topk, self.max_topk)
        return DraftShape(steps, topk, min(self.num_draft_tokens, self.max_nodes))

    def torch_device(self) -> torch.device:
        """Return the device that `device` means on this machine."""
        if self.device != "auto":
            return torch.device(self.device)
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")

    def torch_dtype(self, device: torch.device) -> torch.dtype:
        """Return the type of weights and activations on `device`."""
        if self.dtype is Dtype.AUTO:
            return torch.float32 if device.type == "cpu" else torch.bfloat16
        dtype: torch.dtype = getattr(torch, self.dtype.value)
        return dtype


def plan_pages(settings: DraftSettings, bytes_per_token: int, gpu_memory: tuple[int, int] | None) -> int:
    """Return how many pages the pool gets; pure, so that it is tested without a GPU.

    Args:
        settings: `kv_tokens`, `mem_fraction_static`, `max_sessions`, `page_size` and the caps of a tree.
        bytes_per_token: Of one token in the head's KV.
        gpu_memory: (free, total) bytes of the GPU once the head is loaded; None on a CPU.

    Raises:
        ConfigurationError: the pool would hold no sequence with the largest tree.
    """
    if gpu_memory is None:
        tokens = min(CPU_KV_TOKENS, CPU_KV_BYTES // bytes_per_token)
    else:
        free, total = gpu_memory
        share = settings.mem_fraction_static
        budget = (
            int(free * FREE_SHARE)
            if share is None
            else max(0, min(free, int(total * share) - (total - free)))
        )
        tokens = min(settings.max_sessions * SESSION_TOKENS, budget // bytes_per_token)
    tokens = settings.kv_tokens or tokens
    pages = -(-tokens // settings.page_size)
    smallest = settings.max_topk * settings.max_steps + settings.page_size
    if pages * settings.page_size < smallest:
        raise ConfigurationError(
            f"kv_tokens: {pages * settings.page_size} tokens hold no sequence with a tree of {settings.max_steps} levels of "
            f"{settings.max_topk}; at least {smallest} are needed.",
            field="kv_tokens",
        )
    return pages


def plan_threads(settings: DraftSettings, hidden_size: int) -> int | None:
    """Return how many CPU threads the head gets; None leaves torch's own choice."""
    if settings.threads is not None:
        return settings.threads
    return 1 if hidden_size <= SMALL_HEAD else None
