"""Makes a strategy and an engine from settings: loading, checking, sizing. Used by the service and by the in-process drafter."""

from __future__ import annotations

from pathlib import Path

import torch

from outrider.services.draft.engine import DraftEngine
from outrider.services.draft.heads.registry import load_head
from outrider.services.draft.metrics import DraftMetrics
from outrider.services.draft.runner import HeadRunner
from outrider.services.draft.sessions import SessionLimits
from outrider.services.draft.settings import DraftSettings, plan_pages
from outrider.services.draft.strategy import DraftStrategy, TargetInfo
from outrider.shared.attn.create import create_backend
from outrider.shared.base.errors import CheckpointError
from outrider.shared.kv.pool import KVPool, token_bytes
from outrider.shared.nn.config import ModelConfig
from outrider.shared.nn.loader import CheckpointReader
from outrider.shared.obs.logging import get_logger

log = get_logger("outrider.draft")

TIED = {"lm_head.weight": "model.embed_tokens.weight"}


def build_engine(settings: DraftSettings, device: torch.device, dtype: torch.dtype) -> DraftEngine:
    """Load the head and make an engine that follows no session yet.

    Raises:
        CheckpointError: the head, or what it should borrow from `target_weights`, is unusable; names the key or tensor.
        ConfigurationError: the KV pool is too small.
    """
    head = load_head(settings.draft, device, dtype)
    free_gpu_bytes = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else None
    pages = plan_pages(settings, token_bytes(head.num_layers, head.kv_heads, head.head_dim, dtype), free_gpu_bytes)
    pool = KVPool(pages, settings.page_size, head.num_layers, head.kv_heads, head.head_dim, dtype, device)
    attention = create_backend(settings.attention_backend, device)
    strategy = HeadRunner(head, pool, attention, settings.draft.resolve().name, settings.max_shape())
    if settings.target_weights is not None:
        borrow(strategy, settings.target_weights, device, dtype)
    limits = SessionLimits(
        max_sessions=settings.max_sessions,
        max_len=strategy.info.max_len,
        vocab_size=strategy.info.vocab_size,
        feature_size=strategy.info.feature_size,
        max_shape=settings.max_shape(),
        lease_s=settings.lease_s,
        evict_idle_s=settings.evict_idle_s,
        row_source=strategy.info.row_source,
        inherits=strategy.info.inherits,
    )
    metrics = DraftMetrics()
    engine = DraftEngine(strategy, limits, metrics)
    metrics.watch(lambda: len(engine.sessions), lambda: strategy.pages().free, lambda: strategy.pages().held)
    log.info("draft engine made", algorithm=strategy.info.algorithm, pages=pages, page_size=settings.page_size, device=str(device))
    return engine


def borrow(strategy: DraftStrategy, target_weights: Path, device: torch.device, dtype: torch.dtype) -> None:
    """Check that the head fits the target in a folder, and read the tensors that it borrows, and only those.

    Raises:
        CheckpointError: it does not fit, or a tensor is missing; names the key or tensor.
    """
    config = ModelConfig.from_dir(target_weights)
    target = TargetInfo(target_weights.name, config.fingerprint, config.vocab_size, config.hidden_size, config.num_layers)
    strategy.feature_spec(target)
    wanted = strategy.missing()
    if not wanted:
        return
    with CheckpointReader(target_weights, device=device, dtype=dtype) as reader:
        for name, shape in wanted.items():
            stored = TIED.get(name, name) if config.tie_word_embeddings else name
            if stored not in reader.names:
                raise CheckpointError(
                    f"{target_weights}: {stored} is missing, and the draft head borrows it; give the target's complete folder.",
                    field=stored,
                )
            strategy.lend(name, reader.take(stored, shape))
    log.info("borrowed from the target", folder=str(target_weights), tensors=list(wanted))
