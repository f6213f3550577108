"""Builds the draft engine from settings: loads the drafting strategy, sizes its KV pool, borrows tensors.

A draft borrows the tensors that its own checkpoint lacks, such as the embedding, from the target. The draft
service and the in-process drafter call `build_engine`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from outrider.services.draft.algorithm import (
    Algorithm,
    Choice,
    check_head,
    check_token_map_use,
    choose_algorithm,
)
from outrider.services.draft.engine import DraftEngine
from outrider.services.draft.heads.files.token_map import read_token_map
from outrider.services.draft.heads.registry import load_head
from outrider.services.draft.metrics import DraftMetrics
from outrider.services.draft.sessions.session_table import SessionLimits
from outrider.services.draft.settings import DraftSettings, plan_pages
from outrider.services.draft.strategies.base import DraftStrategy
from outrider.services.draft.strategies.head import HeadStrategy
from outrider.services.draft.strategies.mtp import MtpStrategy
from outrider.services.draft.strategies.mtp_copies import compare_copies
from outrider.services.draft.strategies.mtp_layers import MtpWeights
from outrider.services.draft.strategies.mtp_model import MtpModel
from outrider.services.draft.strategies.ngram.corpus import Corpus
from outrider.services.draft.strategies.ngram.strategy import NgramOptions, NgramStrategy
from outrider.services.draft.strategies.standalone import StandaloneStrategy, StandaloneVocabulary
from outrider.services.draft.strategies.tokenizer_check import check_same_tokenizer
from outrider.services.draft.target_info import TargetInfo
from outrider.shared.attn.base import AttentionBackend
from outrider.shared.attn.create import create_backend
from outrider.shared.base.errors import CheckpointError
from outrider.shared.kv.pool import CacheSizing, KVPool, token_bytes
from outrider.shared.nn.checkpoint.checkpoint_reader import CheckpointReader
from outrider.shared.nn.open import load_decoder, read_model_config
from outrider.shared.obs.logging import get_logger
from outrider.shared.obs.progress import loading

log = get_logger("outrider.draft")

TIED = {"lm_head.weight": "model.embed_tokens.weight"}
"""Tensors that a target with tied embeddings stores under another name."""


def build_engine(
    settings: DraftSettings,
    device: torch.device,
    dtype: torch.dtype,
    target: TargetInfo | None = None,
    sizing: CacheSizing | None = None,
) -> DraftEngine:
    """Load the drafting strategy, and build a draft engine that has no sessions yet.

    Args:
        settings: The resolved settings.
        device, dtype: Device and dtype to compute with.
        target: Description of a target in this process. After this call, the caller must lend the target's
            tensors to the strategy. None if the target runs in another process.
        sizing: Function that chooses the size of the KV cache if `kv_tokens` is not set. If `sizing` is None,
            `plan_pages` chooses the size.

    Raises:
        CheckpointError: The draft's checkpoint, or a tensor that the draft borrows, is unusable. The message
            names the key or tensor.
        ConfigurationError: The settings contradict each other, or the KV pool is too small.
    """
    # 1. Choose the way of drafting, and check that it fits the target.
    choice = choose_algorithm(settings.speculative_algorithm, settings.draft, settings.target_weights)
    check_token_map_use(choice, settings.speculative_token_map)
    theirs = settings.target_weights
    same_tokenizer = (
        choice.folder is not None and theirs is not None and check_same_tokenizer(choice.folder, theirs)
    )
    # 2. Load the strategy. Its borrowed tensors come from files, unless a target in this process lends them.
    strategy = BUILDERS[choice.algorithm](
        Build(settings, choice, device, dtype, target, same_tokenizer, sizing)
    )
    lender = settings.target_weights or (choice.folder if choice.algorithm is Algorithm.MTP else None)
    if target is None and lender is not None:
        borrow(strategy, lender, device, dtype)
    # 3. Build the engine with the limits of the strategy.
    info = strategy.info
    limits = SessionLimits(
        max_sessions=settings.max_sessions,
        max_len=info.max_len,
        vocab_size=info.vocab_size,
        feature_size=info.feature_size,
        max_shape=settings.max_shape(),
        lease_s=settings.lease_s,
        evict_idle_s=settings.evict_idle_s,
        row_source=info.row_source,
        rewind=info.rewind,
        usual_shape=settings.usual_shape(),
    )
    if strategy.growth is not None:
        strategy.growth.graphs.limit(disabled=settings.disable_cuda_graph, max_bs=settings.cuda_graph_max_bs)
    metrics = DraftMetrics()
    engine = DraftEngine(strategy, limits, metrics)
    metrics.watch(lambda: len(engine.sessions), lambda: strategy.pages().free, lambda: strategy.pages().held)
    log.info(
        "draft engine built",
        algorithm=info.algorithm,
        pages=strategy.pages().total,
        page_size=settings.page_size,
        device=str(device),
    )
    return engine


@dataclass(frozen=True, slots=True)
class Build:
    """The inputs for building a drafting strategy.

    Attributes:
        settings: The resolved settings.
        choice: The drafting algorithm, and the checkpoint folder that it reads.
        device, dtype: Device and dtype to compute with.
        target: Description of the target if it runs in this process; otherwise None.
        same_tokenizer: True if the tokenizers in the draft's and the target's folder were compared and are
            equal.
        sizing: Function that chooses the size of the KV cache. None selects `plan_pages`.
    """

    settings: DraftSettings
    choice: Choice
    device: torch.device
    dtype: torch.dtype
    target: TargetInfo | None
    same_tokenizer: bool
    sizing: CacheSizing | None

    def target_vocab_size(self) -> int | None:
        """Return the size of the target's vocabulary, or None while unknown."""
        if self.target is not None:
            return self.target.vocab_size
        folder = self.settings.target_weights
        return read_model_config(folder).vocab_size if folder is not None else None

    def token_map(self) -> torch.Tensor | None:
        """Return the only target ids to draft, ``[size] int64``; None if drafting is not restricted."""
        path = self.settings.speculative_token_map
        return read_token_map(path).to(self.device) if path is not None else None

    def num_pages(self, bytes_per_token: int) -> int:
        """Return the number of pages of the strategy's pool. Call this method after loading the weights."""
        if self.sizing is not None and self.settings.kv_tokens is None:
            return plan_pages(self.settings.sized(self.sizing(bytes_per_token)), bytes_per_token, None)
        gpu_memory = torch.cuda.mem_get_info(self.device) if self.device.type == "cuda" else None
        return plan_pages(self.settings, bytes_per_token, gpu_memory)

    def attention(self) -> AttentionBackend:
        """Create an attention backend for one strategy."""
        return create_backend(self.settings.attention_backend, self.device)


def _build_head(build: Build) -> DraftStrategy:
    folder = build.choice.require_folder()
    head = load_head(folder, build.device, build.dtype, build.token_map())
    check_head(build.choice, head.algorithm)
    pages = build.num_pages(
        token_bytes(head.num_layers, head.kv_heads, head.head_dim, build.dtype, latent=head.latent)
    )
    pool = KVPool(
        pages,
        build.settings.page_size,
        head.num_layers,
        head.kv_heads,
        head.head_dim,
        build.dtype,
        build.device,
        latent=head.latent,
    )
    return HeadStrategy(head, pool, build.attention(), folder.resolve().name, build.settings.max_shape())


def _build_ngram(build: Build) -> DraftStrategy:
    settings = build.settings
    corpus = (
        Corpus.read(settings.ngram_corpus, settings.target_weights)
        if settings.ngram_corpus is not None
        else None
    )
    options = NgramOptions(settings.ngram_min_match, settings.ngram_max_match)
    return NgramStrategy(options, build.target_vocab_size(), corpus, build.device)


def _build_mtp(build: Build) -> DraftStrategy:
    settings, folder = build.settings, build.choice.require_folder()
    weights = MtpWeights.load(folder, build.device, build.dtype)
    if settings.target_weights is not None:
        for one in compare_copies(weights, folder, settings.target_weights):
            if not one.same:
                log.warning("MTP layers may not fit the target", tensor=one.name, problem=one.warning)
    model = MtpModel(weights, build.device, build.dtype, build.token_map())
    pages = build.num_pages(model.bytes_per_token(settings.page_size))
    pool = model.make_pool(pages, settings.page_size)
    return MtpStrategy(model, pool, build.attention(), folder.resolve().name, settings.max_shape())


def _build_standalone(build: Build) -> DraftStrategy:
    settings, folder = build.settings, build.choice.require_folder()
    with loading(folder, log, to_console=not settings.log_json) as progress:
        decoder = load_decoder(folder, build.device, build.dtype, progress)
    pages = build.num_pages(decoder.make_pool(1, settings.page_size).bytes_per_token)
    pool = decoder.make_pool(pages, settings.page_size)
    return StandaloneStrategy(
        decoder,
        pool,
        build.attention(),
        folder.resolve().name,
        settings.max_shape(),
        StandaloneVocabulary(build.target_vocab_size(), build.same_tokenizer, build.token_map()),
    )


BUILDERS: Mapping[Algorithm, Callable[[Build], DraftStrategy]] = {
    Algorithm.EAGLE: _build_head,
    Algorithm.MTP: _build_mtp,
    Algorithm.NGRAM: _build_ngram,
    Algorithm.STANDALONE: _build_standalone,
}


def borrow(strategy: DraftStrategy, target_weights: Path, device: torch.device, dtype: torch.dtype) -> None:
    """Check that the draft fits the target in the folder `target_weights`, and read the borrowed tensors.

    Raises:
        CheckpointError: The draft does not fit the target, or the target's folder lacks a borrowed tensor.
            The message names the key or tensor.
    """
    config = read_model_config(target_weights)
    strategy.feature_spec(TargetInfo.of(target_weights.name, config))
    wanted = strategy.missing()
    if not wanted:
        return
    with CheckpointReader(target_weights, device=device, dtype=dtype) as reader:
        for name, shape in wanted.items():
            stored = TIED.get(name, name) if config.tie_word_embeddings else name
            if stored not in reader.names:
                raise CheckpointError(
                    f"{target_weights}: the tensor {stored} is missing, but the draft borrows it. Give the "
                    "target's complete folder.",
                    field=stored,
                )
            strategy.lend(name, reader.take(stored, shape))
    log.info("borrowed from the target", folder=str(target_weights), tensors=list(wanted))
