"""The settings of `outrider serve target`: defaults, help texts, and checks of their combinations."""

from __future__ import annotations

import os
from enum import Enum
from pathlib import Path

import torch
from pydantic import Field

from outrider.services.target.choices import (
    Device,
    ExchangePlacement,
    KvCacheDtype,
    OverlapSchedule,
    Quantization,
)
from outrider.services.target.grammar.backend import GrammarBackend
from outrider.services.target.ranks import Ranks
from outrider.services.target.request import SpeculationLimits
from outrider.shared.attn.create import AttentionKind
from outrider.shared.base.errors import ConfigurationError
from outrider.shared.base.settings import Dtype, settings_config
from outrider.shared.parallel.reduce import ReduceKind
from outrider.shared.rpc.address import IpcAddress, check_address
from outrider.shared.rpc.peer_settings import ListenerSettings
from outrider.shared.spec.algorithm import Algorithm
from outrider.shared.spec.tree import DraftShape

CUDA_PREFILL_TOKENS = 8192
"""Default number of prompt tokens per step on a GPU.

The value equals SGLang's default `chunked_prefill_size` and vLLM's `max_num_batched_tokens` on large GPUs.
"""
CPU_PREFILL_TOKENS = 512
FEWEST_RUNNING_REQUESTS, MOST_RUNNING_REQUESTS = 16, 256
"""Bounds of the default number of running sequences."""
AUTO_CHAIN_STEPS = 10
"""Depth of the longest chain that `auto` chooses by default. Few drafts are good enough for longer chains."""


class TargetSettings(ListenerSettings):
    """Settings of `outrider serve target`. Field descriptions are the help texts of the flags."""

    model_config = settings_config("target")

    listen: str = Field("127.0.0.1:7001", description="Address of the gRPC service: host:port or unix:/path.")
    model: Path = Field(description="Model folder in Hugging Face layout, or ORG/NAME on the hub.")
    revision: str = Field("", description="Branch, tag or commit of a model on the hub. Default: main.")
    draft_revision: str = Field("", description="Branch, tag or commit of a draft in this process.")
    served_model_id: str = Field(
        "", description="Model name that clients see. Default: ORG/NAME, or the folder's name."
    )
    device: str = Field(
        "auto", pattern="^(auto|cpu|cuda(:[0-9]+)?)$", description="auto, cpu, cuda or cuda:N."
    )
    dtype: Dtype = Field(Dtype.AUTO, description="auto, float32, bfloat16 or float16.")
    tp: int = Field(1, ge=1, le=64, description="Number of GPUs (on a CPU, processes) that share the model.")
    tp_all_reduce: ReduceKind = Field(
        ReduceKind.AUTO,
        description="How ranks sum results: auto (Outrider's kernels), one-shot (torch's) or group (NCCL).",
    )
    tp_timeout_s: float = Field(
        120.0, gt=0, description="The target exits if a rank does not join a step within this time."
    )
    attention_backend: AttentionKind = Field(
        AttentionKind.AUTO,
        description="auto, reference, triton, or flashinfer (which needs outrider[flashinfer]).",
    )
    grammar_backend: GrammarBackend = Field(
        GrammarBackend.LLGUIDANCE,
        description="Library for output formats such as JSON schemas: llguidance, xgrammar (extra) or auto.",
    )
    deterministic: bool = Field(
        False, description="Compute the same bits with and without drafts and in any batch. This is slower."
    )
    quantization: Quantization = Field(
        Quantization.NONE, description="none, or fp8: multiply 8-bit weights with 8-bit activations."
    )
    kv_cache_dtype: KvCacheDtype = Field(
        KvCacheDtype.AUTO,
        description="auto (the model's data type), or fp8_e4m3 (half the memory).",
    )
    enable_torch_compile: bool = Field(
        False, description="Compile the norms and MLPs of models that run through transformers."
    )
    torch_compile_max_bs: int = Field(
        32, ge=1, description="Largest number of rows of a pass that --enable-torch-compile compiles."
    )
    draft: str = Field(
        "none",
        description="Address of the draft: grpc://host:port, unix:/path, ipc:///path (this host), or none.",
    )
    speculative_algorithm: Algorithm = Field(
        Algorithm.AUTO,
        description="Algorithm of the draft. auto: any algorithm. NONE: decode without a draft.",
    )
    speculative_token_map: Path | None = Field(
        None, description="File of token ids to draft (FR-Spec), for a draft in this process."
    )
    ngram_corpus: Path | None = Field(
        None, description="File of additional texts for n-gram drafting in this process."
    )
    num_steps: int = Field(5, ge=1, description="Default depth of a draft tree.")
    topk: int = Field(4, ge=1, description="Default number of branches per level of a draft tree.")
    num_draft_tokens: int = Field(
        16, ge=1, description="Default number of nodes of a draft tree, including the root."
    )
    max_steps: int = Field(16, ge=1, description="Largest depth of a tree that a request may set.")
    max_topk: int = Field(16, ge=1, description="Largest number of branches that a request may set.")
    max_nodes: int = Field(128, ge=1, description="Largest number of nodes of a tree that a request may set.")
    max_running_requests: int | None = Field(
        None,
        ge=1,
        description="Largest number of running sequences. Default: 16 on a CPU. On a GPU, 16 to 256, as "
        "its memory allows.",
    )
    max_queued_requests: int = Field(
        512, ge=1, description="Largest number of waiting sequences. Others get RESOURCE_EXHAUSTED."
    )
    max_queued_prompt_tokens: int = Field(
        1_000_000, ge=1, description="Largest number of waiting prompt tokens. Others get RESOURCE_EXHAUSTED."
    )
    page_size: int = Field(16, ge=1, le=1024, description="Tokens per page of the KV cache.")
    kv_tokens: int | None = Field(
        None, ge=1, description="Size of the KV cache in tokens. Default: as large as fits."
    )
    mem_fraction_static: float = Field(
        0.85, gt=0, lt=1, description="Share of GPU memory for weights and KV cache, including the draft's."
    )
    max_model_len: int | None = Field(
        None, ge=2, description="Largest number of tokens of prompt and answer. Default: the model's context."
    )
    cuda_graph_max_bs: int = Field(
        256, ge=1, description="Largest number of requests in a round for which CUDA graphs are recorded."
    )
    disable_tile_trial: bool = Field(
        False,
        description="Do not search for faster tiles of matrix products at start. Ignore earlier searches.",
    )
    disable_prefix_cache: bool = Field(
        False, description="Compute every prompt in full. Keep no K/V of ended requests."
    )
    disable_cuda_graph: bool = Field(False, description="Record no CUDA graphs. Launch kernels one by one.")
    overlap_schedule: OverlapSchedule = Field(
        OverlapSchedule.AUTO,
        description="Launch a round before the last round's results are read: auto (on a GPU), on or off.",
    )
    disable_overlap_schedule: bool = Field(False, description="Same as --overlap-schedule off.")
    max_packed_rows: int = Field(
        2048, ge=1, description="Largest number of nodes of all trees of a round. Further trees must wait."
    )
    prefill_budget_ms: float = Field(
        20.0, gt=0, description="Time to compute prompts between two rounds while other requests decode."
    )
    prefill_chunk: int | None = Field(
        None, ge=1, description="Largest number of prompt tokens per step. Default: 8192 (GPU), 512 (CPU)."
    )
    threads: int | None = Field(
        None, ge=1, description="Number of CPU threads of the model. Default: half of the cores."
    )
    draft_wait_s: float = Field(
        60.0,
        ge=0,
        description="Longest wait for the draft at start. At most 20 s if nothing listens at the address.",
    )
    draft_fault_deadline_s: float = Field(
        2.0, gt=0, description="Time after which a draft that does not answer counts as faulty."
    )
    draft_rounds: ExchangePlacement = Field(
        ExchangePlacement.AUTO,
        description="Where rounds with a draft in another process run: host, device, or auto (GPU: device).",
    )
    step_deadline_s: float = Field(
        60.0,
        gt=0,
        description="Time after which a step counts as hung. After three times this time, the target exits.",
    )
    drain_notice_s: float = Field(
        0.0, ge=0, description="On SIGTERM: time between reporting not ready and refusing new requests."
    )
    drain_grace_s: float = Field(30.0, ge=0, description="On SIGTERM: time for running requests to finish.")
    log_interval_s: float = Field(10.0, ge=0, description="Interval of log lines about load. 0: no lines.")
    log_level: str = Field(
        "info", pattern="^(debug|info|warning|error)$", description="debug, info, warning or error."
    )
    log_json: bool = Field(False, description="Write each log line as a JSON object.")

    def check(self) -> None:
        """Check conditions that involve several fields.

        Raises:
            ConfigurationError: The error names the field and the fix.
        """
        self.check_listen(self.listen)
        for name, value, cap_name, cap in (
            ("num_steps", self.num_steps, "max_steps", self.max_steps),
            ("topk", self.topk, "max_topk", self.max_topk),
            ("num_draft_tokens", self.num_draft_tokens, "max_nodes", self.max_nodes),
        ):
            if value > cap:
                raise ConfigurationError(
                    f"{name} = {value} is above {cap_name} = {cap}; raise the cap or lower the default.",
                    field=name,
                )
        # The default is exempt, because a chain uses only the nodes that it needs.
        if (
            self.topk == 1
            and self.num_draft_tokens > self.num_steps + 1
            and "num_draft_tokens" in self.model_fields_set
        ):
            raise ConfigurationError(
                f"num_draft_tokens = {self.num_draft_tokens}: with topk 1 a draft is a chain of "
                f"num_steps + 1 = {self.num_steps + 1} nodes. Lower it, or raise num_steps or topk.",
                field="num_draft_tokens",
            )
        for name in ("speculative_token_map", "ngram_corpus"):
            if getattr(self, name) is not None and not self.draft.startswith("inproc:"):
                raise ConfigurationError(
                    f"{name}: the draft runs in another process. Pass the flag to `outrider serve draft`.",
                    field=name,
                )
        if self.device.startswith("cuda") and not torch.cuda.is_available():
            raise ConfigurationError(
                "device: cuda was requested, but torch finds no GPU; use --device cpu.", field="device"
            )
        self.grammar_backend.check_installed()
        self.draft_address()
        self._check_numerics()
        self._check_ineffective()
        self._check_ranks()

    def keeps_draft_rounds(self, device: torch.device) -> bool:
        """Return True if rounds with a draft in another process run on the devices of target and draft."""
        if self.draft_rounds is ExchangePlacement.AUTO:
            return device.type == "cuda" and self.tp == 1
        return self.draft_rounds is ExchangePlacement.DEVICE

    def draft_address(self) -> str | None:
        """Return the address of the draft service, or None without a draft service."""
        if self.draft == "none" or self.speculative_algorithm is Algorithm.NONE:
            return None
        if self.draft.startswith("grpc://"):
            return check_address(self.draft.removeprefix("grpc://").rstrip("/"), "draft")
        if self.draft.startswith("unix:"):
            return check_address(self.draft, "draft")
        if IpcAddress.parse(self.draft, "draft"):
            return self.draft
        raise ConfigurationError(
            f"draft: expected none, grpc://host:port, unix:/path or ipc:///path, not {self.draft!r}.",
            field="draft",
        )

    def limits(self) -> SpeculationLimits:
        """Return the default tree shape, and the caps on the tree shapes that requests may ask for.

        If `num_steps` is not set, mode `auto` may also choose chains that are deeper than the default shape.
        """
        shape = DraftShape(self.num_steps, self.topk, self.num_draft_tokens)
        deepest = (
            self.num_steps if "num_steps" in self.model_fields_set else min(AUTO_CHAIN_STEPS, self.max_steps)
        )
        most = self.num_draft_tokens if "num_draft_tokens" in self.model_fields_set else self.max_nodes
        return SpeculationLimits(shape, self.max_steps, self.max_topk, self.max_nodes, min(deepest, most - 1))

    def ranks(self) -> Ranks | None:
        """Return this process's rank and the number of ranks if `torchrun` started it. Otherwise return None.

        Raises:
            ConfigurationError: The environment variable WORLD_SIZE differs from `tp`, or a variable is not a
                number.
        """
        if self.tp == 1 or "WORLD_SIZE" not in os.environ:
            return None
        ranks = Ranks.from_environment()
        if ranks.size != self.tp:
            raise ConfigurationError(
                f"tp: WORLD_SIZE is {ranks.size}, but --tp is {self.tp}; start one process per rank.",
                field="tp",
            )
        return ranks

    def torch_device(self) -> torch.device:
        """Return the device on this machine.

        Ranks use consecutive GPUs. The first is the configured GPU, or GPU 0 if no GPU is configured.
        """
        name = self.device
        if name == Device.AUTO.value:
            name = "cuda" if torch.cuda.is_available() else "cpu"
        device = torch.device(name)
        if self.tp == 1 or device.type == "cpu":
            return device
        ranks = self.ranks()
        return torch.device("cuda", (device.index or 0) + (ranks.local_rank if ranks else 0))

    def prefill_tokens(self) -> int:
        """Return the maximum number of prompt tokens per engine step.

        A step reads the weights once for any number of tokens. It should therefore have enough tokens to keep
        the device busy.
        """
        return self.prefill_chunk or (
            CUDA_PREFILL_TOKENS if self.torch_device().type == "cuda" else CPU_PREFILL_TOKENS
        )

    @property
    def running_requests(self) -> int:
        """Maximum number of running sequences; see `startup.running_requests` for the default on a GPU."""
        return self.max_running_requests or FEWEST_RUNNING_REQUESTS

    def cpu_threads(self) -> int:
        """Return the number of CPU threads per forward pass.

        With more threads than free cores, every step would wait for the slowest thread.
        """
        return self.threads or max(1, (os.cpu_count() or 1) // 2 // self.tp)

    def torch_dtype(self) -> torch.dtype | None:
        """Return the configured data type, or None for the device's default."""
        return None if self.dtype is Dtype.AUTO else getattr(torch, self.dtype.value)

    def _check_numerics(self) -> None:
        for name, chosen in (
            ("deterministic", self.deterministic),
            ("attention_backend", self.attention_backend is AttentionKind.FLASHINFER),
        ):
            if chosen and self.tp > 1:
                raise ConfigurationError(
                    f"{name} is not supported with --tp {self.tp}; omit it, or use --tp 1.", field=name
                )
        if self.deterministic and self.attention_backend is not AttentionKind.AUTO:
            raise ConfigurationError(
                "deterministic uses its own attention; omit --attention-backend or --deterministic.",
                field="attention_backend",
            )
        on_gpu = self.torch_device().type == "cuda"
        if self.deterministic and self.quantization is not Quantization.NONE and on_gpu:
            raise ConfigurationError(
                "deterministic: on a GPU, FP8 products have no batch-invariant kernels; omit --quantization.",
                field="quantization",
            )
        readers = (AttentionKind.AUTO, AttentionKind.TRITON)
        if self.kv_cache_dtype is not KvCacheDtype.AUTO and self.attention_backend not in readers:
            raise ConfigurationError(
                f"kv_cache_dtype: {self.attention_backend.value} attention reads K and V in the model's "
                "type; use auto or triton.",
                field="kv_cache_dtype",
            )

    def _check_ineffective(self) -> None:
        """Refuse options that have no effect in combination with the other options."""
        waits = self.attention_backend is AttentionKind.FLASHINFER
        overlaps, on_cpu = self.overlap_schedule is OverlapSchedule.ON, self.torch_device().type == "cpu"
        for name, idle, why in (
            (
                "overlap_schedule",
                overlaps and waits,
                "flashinfer waits for the GPU in every pass; use auto, or another attention_backend",
            ),
            (
                "overlap_schedule",
                overlaps and self.disable_overlap_schedule,
                "disable_overlap_schedule turns it off; omit one of them",
            ),
            (
                "torch_compile_max_bs",
                not self.enable_torch_compile,
                "nothing is compiled; set enable_torch_compile, or omit it",
            ),
            (
                "tp_all_reduce",
                self.tp == 1,
                "a single GPU has nothing to sum with others; set tp, or omit it",
            ),
            (
                "draft_rounds",
                self.draft_address() is None,
                "there is no draft in another process; set draft, or omit it",
            ),
            ("mem_fraction_static", on_cpu, "on a CPU kv_tokens sizes the cache; omit it"),
        ):
            value = getattr(self, name)
            if idle and value != type(self).model_fields[name].default:
                shown = value.value if isinstance(value, Enum) else value
                raise ConfigurationError(f"{name} = {shown} would do nothing: {why}.", field=name)

    def _check_ranks(self) -> None:
        ranks, device = self.ranks(), self.torch_device()
        if device.type == "cuda" and self.tp > 1:
            last = (device.index or 0) + (0 if ranks else self.tp - 1)
            if last >= torch.cuda.device_count():
                raise ConfigurationError(
                    f"tp: {self.tp} ranks need cuda:{last}, but this machine has {torch.cuda.device_count()} "
                    "GPUs; lower --tp, or start the ranks on several hosts with torchrun.",
                    field="tp",
                )
