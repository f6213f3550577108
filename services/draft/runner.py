"""Runs a recurrent head over sessions: true features into its KV (draft extend), then trees. Owns the KV pool.

Ledger of the pool (who owns a token's slot in a session's lease):

    token index                       holds                               freed by
    [0, cached_rows)                  rows made of true features          the lease's release
    [cached_rows, + scratch_rows)     rows of the tree being grown        overwritten by the next extend; the lease's release
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from outrider.services.draft.expand import Coupling, GrowBatch, TreeGrower, scratch_rows
from outrider.services.draft.heads.base import RecurrentHead
from outrider.services.draft.session import Session
from outrider.services.draft.strategy import Pages, StrategyInfo, TargetInfo
from outrider.shared.attn.base import AttentionBackend, build_batch
from outrider.shared.kv.pool import KVPool
from outrider.shared.spec.drafter import FeatureSpec
from outrider.shared.spec.tree import DraftBatch, DraftShape

SIGN_BIT = 1 << 63


class HeadRunner:
    """`DraftStrategy` of recurrent heads.

    Args:
        head: The head.
        pool: Its KV: ``head.num_layers`` layers.
        attention: Its attention backend.
        model_id: Name of the checkpoint.
        max_shape: Largest tree that will be asked for.
    """

    def __init__(self, head: RecurrentHead, pool: KVPool, attention: AttentionBackend, model_id: str, max_shape: DraftShape) -> None:
        self._head = head
        self._pool = pool
        self._attention = attention
        self._grower = TreeGrower(head, attention, pool)
        most_scratch = scratch_rows(max_shape.depth, max_shape.topk)
        self.info = StrategyInfo(
            algorithm=head.algorithm,
            model_id=model_id,
            fingerprint=head.fingerprint,
            vocab_size=head.vocabulary.target_size,
            feature_size=head.hidden_size,
            max_len=max(2, pool.capacity_tokens - most_scratch),
        )

    def feature_spec(self, target: TargetInfo | None) -> FeatureSpec:
        """See `DraftStrategy.feature_spec`."""
        return self._head.feature_spec(target)

    def missing(self) -> Mapping[str, tuple[int, ...]]:
        """See `DraftStrategy.missing`."""
        return self._head.missing()

    def lend(self, name: str, tensor: torch.Tensor) -> None:
        """See `DraftStrategy.lend`."""
        self._head.lend(name, tensor)

    def reserve(self, session: Session) -> bool:
        """See `DraftStrategy.reserve`."""
        shape = session.ask.shape if session.ask is not None else None
        scratch = scratch_rows(shape.depth, shape.topk) if shape is not None else 0
        wanted = session.cached_rows + session.extendable_rows + scratch
        if session.lease is None:
            session.lease = self._pool.lease(wanted)
            return session.lease is not None
        return self._pool.reserve(session.lease, wanted)

    @torch.inference_mode()
    def extend(self, sessions: Sequence[Session], max_rows: int) -> None:
        """See `DraftStrategy.extend`."""
        taking: list[Session] = []
        counts: list[int] = []
        for session in sessions:
            count = min(session.extendable_rows, max_rows - sum(counts))
            if count > 0:
                taking.append(session)
                counts.append(count)
        if not taking:
            return
        head = self._head
        starts = [session.cached_rows for session in taking]
        leases = [session.lease for session in taking if session.lease is not None]
        tokens: list[int] = []
        positions: list[int] = []
        for session, start, count in zip(taking, starts, counts, strict=True):
            # The row at position t pairs the feature of t with token t + 1.
            tokens += session.tokens[start + 1 : start + 1 + count]
            positions += range(start, start + count)
        rows = [session.features.take(count) for session, count in zip(taking, counts, strict=True)]
        features = (rows[0] if len(rows) == 1 else torch.cat(rows)).to(device=head.device, dtype=head.dtype)
        host = torch.tensor([tokens, positions], dtype=torch.int32).to(head.device)
        self._attention.plan(build_batch(self._pool, leases, starts, counts))
        states = head.forward(host[0], features, head.rotation(host[1]), self._attention, self._pool)
        last = -1
        for session, count in zip(taking, counts, strict=True):
            last += count
            session.cached_rows += count
            # A copy: a view would keep the states of a whole prompt.
            session.last_state = states[last] if states.shape[0] <= len(taking) else states[last].clone()

    @torch.inference_mode()
    def propose(self, sessions: Sequence[Session]) -> DraftBatch:
        """See `DraftStrategy.propose`."""
        shapes = [session.ask.shape.bounded() for session in sessions if session.ask is not None]
        states = [session.last_state for session in sessions if session.last_state is not None]
        assert len(shapes) == len(states) == len(sessions), "propose needs extended sessions that were asked for a tree"
        batch = GrowBatch(
            leases=[session.lease for session in sessions if session.lease is not None],
            stable_lens=[session.cached_rows for session in sessions],
            states=torch.stack(states),
            root_tokens=[session.tokens[-1] for session in sessions],
            depth=shapes[0].depth,
            topk=shapes[0].topk,
            max_nodes=[shape.max_nodes for shape in shapes],
            coupling=self._coupling(sessions),
        )
        return self._grower.grow(batch)

    def release(self, session: Session) -> None:
        """See `DraftStrategy.release`."""
        if session.lease is not None:
            session.lease.release()
            session.lease = None
        session.last_state = None

    def pages(self) -> Pages:
        """See `DraftStrategy.pages`."""
        allocator = self._pool.allocator
        return Pages(allocator.num_pages, allocator.free_pages, allocator.held_pages)

    def _coupling(self, sessions: Sequence[Session]) -> Coupling | None:
        if all(session.temperature <= 0 for session in sessions):
            return None
        device = self._head.device
        signed = [session.seed - 2 * SIGN_BIT if session.seed >= SIGN_BIT else session.seed for session in sessions]
        return Coupling(
            temperature=torch.tensor([session.temperature for session in sessions], dtype=torch.float32).to(device),
            seeds=torch.tensor(signed, dtype=torch.int64).to(device),
            choices=torch.tensor([session.choice_index for session in sessions], dtype=torch.int32).to(device),
        )
