"""What the target can be told, and how it becomes a plan for the machine at hand."""

from __future__ import annotations

import os
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import torch
from pydantic import Field

from outrider.services.target.request import SpeculationLimits
from outrider.shared.attn.create import AttentionKind
from outrider.shared.base.errors import ConfigurationError
from outrider.shared.base.settings import ServiceSettings, settings_config
from outrider.shared.parallel.reduce import ReduceKind
from outrider.shared.rpc.address import IpcAddress, check_address, check_listen_address
from outrider.shared.spec.algorithm import Algorithm
from outrider.shared.spec.tree import DraftShape

CUDA_PREFILL_TOKENS = 8192
"""What SGLang's `chunked_prefill_size` and vLLM's `max_num_batched_tokens` are on GPUs of this size."""
CPU_PREFILL_TOKENS = 512
AUTO_CHAIN_STEPS = 10
"""The longest chain that `auto` chooses where nobody bounds its depth: few drafts are good enough for more."""


class Device(Enum):
    """Where the model runs; AUTO is CUDA where there is a GPU."""

    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


class Dtype(Enum):
    """Type of weights and activations; AUTO is fp32 on the CPU and bf16 on CUDA."""

    AUTO = "auto"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


class OverlapSchedule(Enum):
    """Whether rounds stay on the device, each launched before the one before is read; AUTO does so on a GPU."""

    AUTO = "auto"
    ON = "on"
    OFF = "off"


class RoundPlacement(Enum):
    """Where rounds with a draft in another process run: by way of the host, or on the devices of both (`shared.spec.device`).

    AUTO keeps them on the device of a target on one GPU.
    """

    AUTO = "auto"
    HOST = "host"
    DEVICE = "device"


class Quantization(Enum):
    """How the products of the layers are computed; NONE in the model's type."""

    NONE = "none"
    FP8 = "fp8"


class KvCacheDtype(Enum):
    """Type of K and V in the cache; AUTO is the model's."""

    AUTO = "auto"
    FP8_E4M3 = "fp8_e4m3"


class TargetSettings(ServiceSettings):
    """Settings of `outrider serve target`."""

    model_config = settings_config("target")

    listen: str = Field("127.0.0.1:7001", description="Address of the gRPC service: host:port or unix:/path.")
    insecure: bool = Field(
        False, description="Listen on addresses that other hosts reach, without authentication."
    )
    model: Path = Field(description="Model folder in Hugging Face layout.")
    served_model_id: str = Field("", description="Name of the model; by default the folder's.")
    device: str = Field(
        "auto", pattern="^(auto|cpu|cuda(:[0-9]+)?)$", description="auto, cpu, cuda or cuda:N."
    )
    dtype: Dtype = Field(Dtype.AUTO, description="auto, float32, bfloat16 or float16.")
    tp: int = Field(
        1, ge=1, le=64, description="Tensor parallelism: GPUs (processes, on a CPU) that share the model."
    )
    tp_all_reduce: ReduceKind = Field(
        ReduceKind.AUTO,
        description="auto: through peer memory where it works; one-shot: sums alone; group: NCCL.",
    )
    tp_timeout_s: float = Field(
        120.0, gt=0, description="A step that a rank does not join for so long ends the target."
    )
    attention_backend: AttentionKind = Field(
        AttentionKind.AUTO,
        description="auto, reference, triton or flashinfer (installed apart; waits for the GPU, so no graphs and no overlap).",
    )
    deterministic: bool = Field(
        False,
        description="Compute a token's logits to the same bits with speculation or without, in every batch and chunking; slower.",
    )
    quantization: Quantization = Field(
        Quantization.NONE, description="none, or fp8: layers' products from 8-bit weights and activations."
    )
    kv_cache_dtype: KvCacheDtype = Field(
        KvCacheDtype.AUTO, description="auto (as the model), or fp8_e4m3: half the memory per token."
    )
    enable_torch_compile: bool = Field(
        False, description="Compile norms and MLPs of models that run through transformers' modules."
    )
    torch_compile_max_bs: int = Field(
        32, ge=1, description="With --enable-torch-compile: passes with more rows run uncompiled."
    )
    draft: str = Field(
        "none",
        description="The draft service: grpc://host:port, unix:/path, ipc:///path on this host, or none.",
    )
    speculative_algorithm: Algorithm = Field(
        Algorithm.AUTO,
        description="As for the draft; NONE decodes without one, auto is what the draft says it is.",
    )
    speculative_token_map: Path | None = Field(
        None, description="With a draft in this process: the token ids to draft (FR-Spec)."
    )
    ngram_corpus: Path | None = Field(
        None, description="With n-grams in this process: further texts, as for `outrider serve draft`."
    )
    num_steps: int = Field(5, ge=1, description="Depth of a draft tree when a request names none.")
    topk: int = Field(4, ge=1, description="Branching per level when a request names none.")
    num_draft_tokens: int = Field(
        16, ge=1, description="Nodes verified per round, the root included, when a request names none."
    )
    max_steps: int = Field(16, ge=1, description="Deepest tree that a request may ask for.")
    max_topk: int = Field(16, ge=1, description="Widest branching that a request may ask for.")
    max_nodes: int = Field(128, ge=1, description="Largest tree that a request may ask for.")
    max_running_requests: int = Field(16, ge=1, description="Sequences that are worked on at once.")
    max_queued_requests: int = Field(
        512, ge=1, description="Sequences that may wait; more get RESOURCE_EXHAUSTED."
    )
    max_queued_prompt_tokens: int = Field(
        1_000_000, ge=1, description="Prompt tokens that may wait; more get RESOURCE_EXHAUSTED."
    )
    page_size: int = Field(16, ge=1, le=1024, description="Tokens per page of the KV cache.")
    kv_tokens: int | None = Field(
        None, ge=1, description="Size of the KV cache in tokens; by default what the memory allows."
    )
    mem_fraction_static: float = Field(
        0.85,
        gt=0,
        lt=1,
        description="Share of the GPU's memory for weights and KV cache, the draft's included.",
    )
    max_model_len: int | None = Field(
        None, ge=2, description="Longest prompt + answer; by default what the model was trained for."
    )
    cuda_graph_max_bs: int = Field(
        64, ge=1, description="Largest batch that CUDA graphs are recorded for; larger ones run without."
    )
    disable_tile_trial: bool = Field(
        False,
        description="Try no tiles of products at start, and use none of earlier trials: what nobody measured takes a rule's.",
    )
    disable_cuda_graph: bool = Field(
        False, description="Record no CUDA graphs; every step is launched kernel by kernel."
    )
    overlap_schedule: OverlapSchedule = Field(
        OverlapSchedule.AUTO,
        description="Launch a round before the last one is read: auto (on a GPU), on or off.",
    )
    disable_overlap_schedule: bool = Field(False, description="The same as --overlap-schedule off.")
    prefill_chunk: int | None = Field(
        None, ge=1, description="Most prompt tokens per step; by default 8192 on a GPU, 512 on a CPU."
    )
    threads: int | None = Field(
        None, ge=1, description="CPU threads of the model; by default half of the cores."
    )
    draft_wait_s: float = Field(
        60.0,
        ge=0,
        description="At start: wait this long for the draft before serving without it; 20 s at most for one that does not even listen.",
    )
    draft_fault_deadline_s: float = Field(
        2.0, gt=0, description="A draft that owes an answer for longer counts as faulty."
    )
    draft_rounds: RoundPlacement = Field(
        RoundPlacement.AUTO,
        description="Rounds with a draft in another process: by way of the host, or kept on the device on both sides; auto: the latter on "
        "a GPU.",
    )
    drain_notice_s: float = Field(
        0.0, ge=0, description="On SIGTERM: time between not serving and refusing new requests."
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
            ConfigurationError: names the field and the fix.
        """
        check_listen_address(self.listen, "listen", allow_remote=self.insecure)
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
        # Not for the default: a chain takes of it what it needs.
        if (
            self.topk == 1
            and self.num_draft_tokens > self.num_steps + 1
            and "num_draft_tokens" in self.model_fields_set
        ):
            raise ConfigurationError(
                f"num_draft_tokens = {self.num_draft_tokens}: with topk 1 drafts are a chain of num_steps + 1 = {self.num_steps + 1} "
                "nodes; lower it, or raise num_steps or topk.",
                field="num_draft_tokens",
            )
        if self.speculative_token_map is not None and not self.draft.startswith("inproc:"):
            raise ConfigurationError(
                "speculative_token_map: the draft runs apart and cuts its own lm_head; give the flag to `outrider serve draft`.",
                field="speculative_token_map",
            )
        if self.ngram_corpus is not None and not self.draft.startswith("inproc:"):
            raise ConfigurationError(
                "ngram_corpus: the draft runs apart and reads its own; give the flag to `outrider serve draft`.",
                field="ngram_corpus",
            )
        if self.device.startswith("cuda") and not torch.cuda.is_available():
            raise ConfigurationError(
                "device: cuda was asked for and torch sees no GPU here; use --device cpu.", field="device"
            )
        self.draft_address()
        self._check_numerics()
        self._check_idle()
        self._check_ranks()

    def keeps_draft_rounds(self, device: torch.device) -> bool:
        """Whether rounds with a draft in another process stay on the device of the target."""
        if self.draft_rounds is RoundPlacement.AUTO:
            return device.type == "cuda" and self.tp == 1
        return self.draft_rounds is RoundPlacement.DEVICE

    def draft_address(self) -> str | None:
        """Return the draft's address, or None without a draft."""
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
        """Return the default tree shape and its caps. Chains that `auto` chooses may be longer than a default that nobody gave."""
        shape = DraftShape(self.num_steps, self.topk, self.num_draft_tokens)
        deepest = (
            self.num_steps if "num_steps" in self.model_fields_set else min(AUTO_CHAIN_STEPS, self.max_steps)
        )
        most = self.num_draft_tokens if "num_draft_tokens" in self.model_fields_set else self.max_nodes
        return SpeculationLimits(shape, self.max_steps, self.max_topk, self.max_nodes, min(deepest, most - 1))

    def ranks(self) -> Ranks | None:
        """Return what `torchrun` (or rank 0) says about the processes of one model; None when this process starts them itself.

        Raises:
            ConfigurationError: The environment's WORLD_SIZE is not `tp`, or a variable is no number.
        """
        if self.tp == 1 or "WORLD_SIZE" not in os.environ:
            return None
        ranks = Ranks(
            rank=_environment_number("RANK"),
            size=_environment_number("WORLD_SIZE"),
            local_rank=_environment_number("LOCAL_RANK"),
            local_size=_environment_number("LOCAL_WORLD_SIZE"),
            host=os.environ.get("MASTER_ADDR", ""),
            port=_environment_number("MASTER_PORT"),
            agent_store=os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        )
        if ranks.size != self.tp:
            raise ConfigurationError(
                f"tp: the environment's WORLD_SIZE is {ranks.size}; start as many processes as --tp says ({self.tp}).",
                field="tp",
            )
        return ranks

    def torch_device(self) -> torch.device:
        """Return the device that `device` means on this machine; ranks take consecutive GPUs from the one that is named, or the first."""
        name = self.device
        if name == Device.AUTO.value:
            name = "cuda" if torch.cuda.is_available() else "cpu"
        device = torch.device(name)
        if self.tp == 1 or device.type == "cpu":
            return device
        ranks = self.ranks()
        return torch.device("cuda", (device.index or 0) + (ranks.local_rank if ranks else 0))

    def prefill_tokens(self) -> int:
        """Return the most prompt tokens of a step: as many as fill the device, since the weights are read once however many there are."""
        return self.prefill_chunk or (
            CUDA_PREFILL_TOKENS if self.torch_device().type == "cuda" else CPU_PREFILL_TOKENS
        )

    def cpu_threads(self) -> int:
        """Return how many threads a forward pass uses on the CPU; more than there are free cores makes every step wait for the slowest."""
        return self.threads or max(1, (os.cpu_count() or 1) // 2 // self.tp)

    def torch_dtype(self) -> torch.dtype | None:
        """Return the dtype, or None for the device's default."""
        return None if self.dtype is Dtype.AUTO else getattr(torch, self.dtype.value)

    def _check_numerics(self) -> None:
        apart = (
            ("deterministic", self.deterministic),
            ("attention_backend", self.attention_backend is AttentionKind.FLASHINFER),
        )
        for name, asked in apart:
            if asked and self.tp > 1:
                raise ConfigurationError(
                    f"{name} is not there for --tp {self.tp}; leave it out, or use --tp 1.", field=name
                )
        if self.deterministic and self.attention_backend is not AttentionKind.AUTO:
            raise ConfigurationError(
                "deterministic brings its own attention; leave --attention-backend out, or --deterministic.",
                field="attention_backend",
            )
        if (
            self.deterministic
            and self.quantization is not Quantization.NONE
            and self.torch_device().type == "cuda"
        ):
            raise ConfigurationError(
                "deterministic: FP8 products have no batch-invariant kernels on a GPU; leave --quantization out.",
                field="quantization",
            )
        if self.kv_cache_dtype is not KvCacheDtype.AUTO and self.attention_backend not in (
            AttentionKind.AUTO,
            AttentionKind.TRITON,
        ):
            raise ConfigurationError(
                f"kv_cache_dtype: {self.attention_backend.value} attention reads K and V in the model's type; use auto or triton.",
                field="kv_cache_dtype",
            )

    def _check_idle(self) -> None:
        """Refuse options that would do nothing beside the others, rather than let somebody believe that they do."""
        waits = self.attention_backend is AttentionKind.FLASHINFER
        overlaps = self.overlap_schedule is OverlapSchedule.ON
        for name, idle, why in (
            (
                "overlap_schedule",
                overlaps and waits,
                "flashinfer waits for the GPU in every pass; use auto, or another attention_backend",
            ),
            (
                "overlap_schedule",
                overlaps and self.disable_overlap_schedule,
                "disable_overlap_schedule says off; leave one of them out",
            ),
            (
                "torch_compile_max_bs",
                not self.enable_torch_compile,
                "nothing is compiled; give enable_torch_compile, or leave it out",
            ),
            (
                "tp_all_reduce",
                self.tp == 1,
                "one GPU has nothing to sum with others; give tp, or leave it out",
            ),
            (
                "draft_rounds",
                self.draft_address() is None,
                "there is no draft in another process; give one by draft, or leave it out",
            ),
            (
                "mem_fraction_static",
                self.torch_device().type == "cpu",
                "on a CPU kv_tokens sizes the cache; leave it out",
            ),
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
                    f"tp: {self.tp} ranks need cuda:{last}, and this machine has {torch.cuda.device_count()} GPUs; lower --tp, or start "
                    "the ranks on several hosts with torchrun.",
                    field="tp",
                )


@dataclass(frozen=True, slots=True)
class Ranks:
    """The processes that share a model, as `torchrun` describes them in the environment.

    Attributes:
        rank, size: This process, of how many.
        local_rank, local_size: The same among those of this host.
        host, port: Where the ranks meet; rank 0 runs on that host.
        agent_store: Whether `torchrun` listens there already; else rank 0 does.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    host: str
    port: int
    agent_store: bool = False


def _environment_number(variable: str) -> int:
    value = os.environ.get(variable, "")
    if not value.isdecimal():
        raise ConfigurationError(
            f"{variable} in the environment must be a number, not {value!r}; torchrun sets it.",
            field=variable,
        )
    return int(value)
