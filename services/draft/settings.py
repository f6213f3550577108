"""Defines the draft's settings (flags of ``serve draft``); derives KV pages, threads, device and dtype."""

from __future__ import annotations

from pathlib import Path

import torch
from pydantic import Field

from outrider.services.draft.algorithm import Algorithm, check_given
from outrider.shared.attn.create import AttentionKind
from outrider.shared.base.errors import ConfigurationError
from outrider.shared.base.settings import Dtype, settings_config
from outrider.shared.rpc.address import grpc_address
from outrider.shared.rpc.peer_settings import ListenerSettings
from outrider.shared.spec.tree import DraftShape

CPU_KV_TOKENS = 64 * 1024
CPU_KV_BYTES = 1 << 30
FREE_SHARE = 0.1
"""Default limit of the KV cache, as a share of the free GPU memory. The rest stays free because the target
may need it."""
SESSION_TOKENS = 4 * 1024
"""Default limit of the KV cache, in tokens for each of `max_sessions` sessions. With 256 sessions, the limit
is about 1M tokens. For comparison, the cache of an 8B target on an H200 has 848K tokens."""
SMALL_HEAD = 1024
"""Hidden size up to which a head's operations are too short to gain from several threads."""


class DraftSettings(ListenerSettings):
    """Settings of `outrider serve draft`."""

    model_config = settings_config("draft")

    listen: str = Field(
        "127.0.0.1:7002",
        description="Address to listen on: host:port, unix:/path, or ipc:///path for targets on this host.",
    )
    draft: Path | None = Field(
        None,
        description="Folder, or ORG/NAME on the hub, of the draft head or model. Leave it out for NGRAM and "
        "for the target's own MTP layers.",
    )
    target_weights: Path | None = Field(
        None,
        description="The target's folder or ORG/NAME, from which the draft reads tensors and the tokenizer.",
    )
    revision: str = Field("", description="Branch, tag or commit of a target on the hub. Default: main.")
    draft_revision: str = Field("", description="Branch, tag or commit of a draft on the hub.")
    speculative_algorithm: Algorithm = Field(
        Algorithm.AUTO,
        description="EAGLE, EAGLE3, MTP (or NEXTN), STANDALONE, NGRAM, NONE, or auto to detect it.",
    )
    speculative_token_map: Path | None = Field(
        None,
        description="FR-Spec: .pt, .safetensors or .json file with the ids of the tokens that the draft may "
        "propose. It needs a draft with a full vocabulary.",
    )
    ngram_min_match: int = Field(1, ge=1, description="NGRAM: smallest number of tokens that must match.")
    ngram_max_match: int = Field(12, ge=1, description="NGRAM: largest number of tokens that are compared.")
    ngram_corpus: Path | None = Field(
        None,
        description="NGRAM: additional texts. A .json or .jsonl file of ids or texts, or one text per line.",
    )
    device: str = Field(
        "auto", pattern="^(auto|cpu|cuda(:[0-9]+)?)$", description="auto, cpu, cuda or cuda:N."
    )
    dtype: Dtype = Field(Dtype.AUTO, description="auto, float32, bfloat16 or float16.")
    attention_backend: AttentionKind = Field(AttentionKind.AUTO, description="auto, reference or triton.")
    disable_tile_trial: bool = Field(
        False,
        description="Do not search for faster tiles of matrix products at start. Ignore earlier searches.",
    )
    max_sessions: int = Field(256, ge=1, description="Largest number of sequences that the draft stores.")
    max_steps: int = Field(16, ge=1, description="Largest tree depth that a target may request.")
    max_topk: int = Field(16, ge=1, description="Largest number of branches that a target may request.")
    max_nodes: int = Field(128, ge=1, description="Largest number of tree nodes that a target may request.")
    num_steps: int = Field(
        5, ge=1, description="Depth of the trees prepared at start. Set the target's value."
    )
    topk: int = Field(4, ge=1, description="Number of branches per level of the trees prepared at start.")
    num_draft_tokens: int = Field(
        16, ge=1, description="Number of nodes, including the root, of the trees prepared at start."
    )
    cuda_graph_max_bs: int = Field(
        256, ge=1, description="Largest number of sequences in a round for which CUDA graphs are recorded."
    )
    disable_cuda_graph: bool = Field(False, description="Record no CUDA graphs. Launch kernels one by one.")
    page_size: int = Field(16, ge=1, le=1024, description="Tokens per page of the draft's KV cache.")
    kv_tokens: int | None = Field(
        None, ge=1, description="Size of the draft's KV cache in tokens. Default: limited by memory."
    )
    mem_fraction_static: float | None = Field(
        None,
        gt=0,
        lt=1,
        description="Share of the GPU's memory for weights and KV cache. By default, the KV cache gets a "
        "tenth of the free memory.",
    )
    threads: int | None = Field(
        None,
        ge=1,
        description="Number of CPU threads of the draft. Default: 1 for a small draft; otherwise torch's.",
    )
    lease_s: float = Field(
        10.0, gt=0, description="Silence after which the draft closes a target's sessions."
    )
    evict_idle_s: float = Field(
        1.0, ge=0, description="Time after which an idle session may be evicted to make room for another."
    )
    drain_grace_s: float = Field(2.0, ge=0, description="On SIGTERM: time to finish the current step.")
    log_level: str = Field(
        "info", pattern="^(debug|info|warning|error)$", description="debug, info, warning or error."
    )
    log_json: bool = Field(False, description="Write each log line as a JSON object.")

    def check(self) -> None:
        """Check the conditions that involve several settings or depend on the machine.

        Raises:
            ConfigurationError: A condition is violated. The message names the setting and the fix.
        """
        self.check_listen(grpc_address(self.listen, "listen"))
        check_given(self.speculative_algorithm, self.draft, self.target_weights)
        if self.ngram_corpus is not None and self.speculative_algorithm is not Algorithm.NGRAM:
            raise ConfigurationError(
                f"ngram_corpus: only NGRAM reads {self.ngram_corpus}. Set --speculative-algorithm NGRAM, "
                "or leave out --ngram-corpus.",
                field="ngram_corpus",
            )
        if self.ngram_min_match > self.ngram_max_match:
            raise ConfigurationError(
                f"ngram_min_match = {self.ngram_min_match} must not be larger than ngram_max_match = "
                f"{self.ngram_max_match}.",
                field="ngram_min_match",
            )
        if self.attention_backend is AttentionKind.FLASHINFER:
            raise ConfigurationError(
                "attention_backend: flashinfer blocks on the GPU, which a draft must not do. Use auto, "
                "reference or triton.",
                field="attention_backend",
            )
        if self.mem_fraction_static is not None and self.torch_device().type == "cpu":
            raise ConfigurationError(
                f"mem_fraction_static = {self.mem_fraction_static} has no effect on a CPU. Leave it out, "
                "and set kv_tokens to size the cache.",
                field="mem_fraction_static",
            )
        if self.device.startswith("cuda") and not torch.cuda.is_available():
            raise ConfigurationError(
                "device: cuda is set, but torch finds no GPU. Use --device cpu.", field="device"
            )

    def sized(self, kv_tokens: int) -> DraftSettings:
        """Return the settings with `kv_tokens` set to this size, unless a size is already set.

        If this size is too small for one tree of the largest shape, the smallest sufficient size is set.
        """
        if self.kv_tokens is not None:
            return self
        return self.model_copy(
            update={"kv_tokens": max(kv_tokens, self.max_topk * self.max_steps + self.page_size)}
        )

    def max_shape(self) -> DraftShape:
        """Return the largest tree that a target may request."""
        return DraftShape(self.max_steps, self.max_topk, self.max_nodes)

    def usual_shape(self) -> DraftShape:
        """Return the default tree of a target, limited by `max_shape`."""
        steps, topk = min(self.num_steps, self.max_steps), min(self.topk, self.max_topk)
        return DraftShape(steps, topk, min(self.num_draft_tokens, self.max_nodes))

    def torch_device(self) -> torch.device:
        """Return the device that the setting `device` selects on this machine."""
        if self.device != "auto":
            return torch.device(self.device)
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")

    def torch_dtype(self, device: torch.device) -> torch.dtype:
        """Return the type of weights and activations on this device."""
        if self.dtype is Dtype.AUTO:
            return torch.float32 if device.type == "cpu" else torch.bfloat16
        dtype: torch.dtype = getattr(torch, self.dtype.value)
        return dtype


def plan_pages(settings: DraftSettings, bytes_per_token: int, gpu_memory: tuple[int, int] | None) -> int:
    """Return the number of pages of the draft's KV pool.

    The function is pure, so that its tests need no GPU.

    Args:
        settings: The settings, of which `kv_tokens`, `mem_fraction_static`, `max_sessions`, `page_size` and
            the tree limits are used.
        bytes_per_token: Size of one token in the draft's KV cache.
        gpu_memory: (free, total) bytes of the GPU's memory after the weights were loaded; None on a CPU.

    Raises:
        ConfigurationError: The pool is too small for one sequence with the largest tree.
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
            f"kv_tokens: {pages * settings.page_size} tokens are too few for a sequence with a tree of "
            f"{settings.max_steps} levels of {settings.max_topk} nodes. Set at least {smallest}.",
            field="kv_tokens",
        )
    return pages


def plan_threads(settings: DraftSettings, hidden_size: int) -> int | None:
    """Return the number of CPU threads for the draft, or None for torch's default."""
    if settings.threads is not None:
        return settings.threads
    return 1 if hidden_size <= SMALL_HEAD else None
