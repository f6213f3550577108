"""Drafting with a recurrent head (EAGLE): extends sessions by pairing the target's features with tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate

import numpy as np
import torch

from outrider.services.draft.growth.draft_model import HeadModel
from outrider.services.draft.growth.recurrent_head import ONLY_KEYS, Ends, RecurrentHead
from outrider.services.draft.sessions.chunks import finish_chunks, leases_of, take_chunks, take_features
from outrider.services.draft.sessions.session import Session
from outrider.services.draft.strategies.base import EXTEND_ROWS, StrategyInfo
from outrider.services.draft.strategies.paged import CUDA_EXTEND_ROWS, PagedStrategy, longest_session
from outrider.services.draft.target_info import TargetInfo
from outrider.shared.attn.base import AttentionBackend, build_batch
from outrider.shared.kv.pool import KVPool
from outrider.shared.kv.upload import upload
from outrider.shared.nn.fused.products import HasProducts, ProductUse
from outrider.shared.spec.drafter import FeatureSpec
from outrider.shared.spec.tree import DraftShape


class HeadStrategy(PagedStrategy, HasProducts):
    """Drafting with a recurrent head, such as an EAGLE head.

    Args:
        head: The head.
        pool: KV pool with ``head.num_layers`` layers.
        attention: Attention backend for this pool.
        model_id: Name of the head's checkpoint.
        max_shape: Largest tree that can be requested.
    """

    def __init__(
        self,
        head: RecurrentHead,
        pool: KVPool,
        attention: AttentionBackend,
        model_id: str,
        max_shape: DraftShape,
    ) -> None:
        info = StrategyInfo(
            algorithm=head.algorithm,
            model_id=model_id,
            fingerprint=head.fingerprint,
            vocab_size=head.vocabulary.target_size,
            feature_size=head.hidden_size,
            max_len=longest_session(pool, max_shape),
            hidden_size=head.hidden_size,
            extend_rows=CUDA_EXTEND_ROWS if head.device.type == "cuda" else EXTEND_ROWS,
        )
        super().__init__(info, HeadModel(head), pool, attention)
        self._head = head

    def feature_spec(self, target: TargetInfo | None) -> FeatureSpec:
        return self._head.feature_spec(target)

    def missing(self) -> Mapping[str, tuple[int, ...]]:
        return self._head.missing()

    def lend(self, name: str, tensor: torch.Tensor) -> None:
        self._head.lend(name, tensor)

    def uses(self) -> list[ProductUse]:
        return self._head.uses() if isinstance(self._head, HasProducts) else []

    @torch.inference_mode()
    def extend(self, sessions: Sequence[Session], max_rows: int, keep: int = 0) -> None:
        chunks = take_chunks(sessions, max_rows, keep)
        if not chunks or self._extended(chunks):
            return
        head = self._head
        # The row at position t pairs the feature of t with the token t + 1.
        tokens = [
            np.array(chunk.session.tokens[chunk.start + 1 : chunk.stop + 1], dtype=np.int32)
            for chunk in chunks
        ]
        positions = [np.arange(chunk.start, chunk.stop, dtype=np.int32) for chunk in chunks]
        features = take_features(chunks, head.device, head.dtype)
        host = upload(np.stack([np.concatenate(tokens), np.concatenate(positions)]), torch.int32, head.device)
        starts, counts = [chunk.start for chunk in chunks], [chunk.count for chunk in chunks]
        batch = build_batch(self._pool, leases_of(chunks), starts, counts)
        # The round that grows the tree later adds the kept rows and computes the state of the last row.
        ends = ONLY_KEYS
        if not keep:
            order = upload(
                [*range(len(chunks) + 1), *(stop - 1 for stop in accumulate(counts))],
                torch.int64,
                head.device,
            )
            firsts, lasts = order.split_with_sizes([len(chunks) + 1, len(chunks)])
            ends = Ends(
                replace(batch, query_start=firsts.to(torch.int32), max_query_len=1, host_lens=None), lasts
            )
        self._attention.plan(batch)
        states = head.forward(
            host[0], features, head.rotation(host[1]), self._attention, self._pool, None, ends
        )
        finish_chunks(chunks, [None] * len(chunks) if keep else states.unbind(0))
