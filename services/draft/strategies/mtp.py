"""Drafting with the multi-token prediction (MTP) layers of the target's own checkpoint.

Layers are counted from 0. At position t, layer m reads the token at t + 1 + m and the state of layer m - 1 at
t. It predicts the token at t + 2 + m. In place of a previous layer's state, layer 0 uses the target's last
hidden state after the final norm. Each layer has its own K/V, in a plane of the KV pool. With C committed
tokens, layer m has C - 1 - m rows.

Layer i runs level i of a tree, so each layer is one stage of the tree's growth (`growth.stages`). The last
layer runs all further levels on its own previous state, as is usual for models with one MTP layer.

The state of a layer's last row is an input of the next layer. The other input, a token, is not known yet.
`StageStates` keeps such states for the next extension.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from outrider.services.draft.growth.stages import StageStates, after_last, fresh_slots
from outrider.services.draft.sessions.chunks import (
    RowChunk,
    finish_chunks,
    leases_of,
    take_chunks,
    take_features,
)
from outrider.services.draft.sessions.session import Session
from outrider.services.draft.strategies.base import StrategyInfo
from outrider.services.draft.strategies.mtp_model import MtpModel
from outrider.services.draft.strategies.paged import PagedStrategy, longest_session
from outrider.services.draft.target_info import TargetInfo
from outrider.shared.attn.base import AttentionBackend, build_batch
from outrider.shared.base.errors import CheckpointError
from outrider.shared.kv.pool import KVPool
from outrider.shared.kv.upload import upload
from outrider.shared.spec.drafter import FeatureSpec
from outrider.shared.spec.tree import DraftShape

FINGERPRINT = "final_hidden"
"""Fingerprint of raw features. The target stores its last hidden state, which is independent of the MTP
layers."""


class MtpStrategy(PagedStrategy):
    """Drafting with MTP layers.

    Args:
        model: The MTP layers.
        pool: KV pool made by `MtpModel.make_pool`.
        attention: Attention backend for this pool.
        model_id: Name of the checkpoint of the layers.
        max_shape: Largest tree that can be requested.
    """

    def __init__(
        self, model: MtpModel, pool: KVPool, attention: AttentionBackend, model_id: str, max_shape: DraftShape
    ) -> None:
        config = model.weights.config
        info = StrategyInfo(
            algorithm="MTP",
            model_id=model_id,
            fingerprint=model.weights.fingerprint,
            vocab_size=config.vocab_size,
            feature_size=config.hidden_size,
            max_len=longest_session(pool, max_shape),
            hidden_size=config.hidden_size,
            # Layer m continues from the last state of layer m - 1. A session that begins with rows in the KV
            # does not have that state, so layer 0 computes m earlier rows again to supply it.
            rewind=model.stages - 1,
        )
        super().__init__(info, model, pool, attention)
        self._model = model

    def feature_spec(self, target: TargetInfo | None) -> FeatureSpec:
        config = self._model.weights.config
        if target is not None:
            for key, mine, theirs in (
                ("hidden_size", config.hidden_size, target.hidden_size),
                ("vocab_size", config.vocab_size, target.vocab_size),
            ):
                if mine != theirs:
                    raise CheckpointError(
                        f"The MTP layers belong to a target with {key} {mine}, but this target's is "
                        f"{theirs}. MTP layers draft only for their own checkpoint: serve that target, or "
                        "give another --draft.",
                        field=key,
                    )
        return FeatureSpec(final_hidden=True, feature_size=config.hidden_size, fingerprint=FINGERPRINT)

    def missing(self) -> Mapping[str, tuple[int, ...]]:
        return self._model.missing()

    def lend(self, name: str, tensor: torch.Tensor) -> None:
        self._model.lend(name, tensor)

    def begin(self, session: Session, known: Session | None, kept: int, stored_len: int) -> int:
        rows = super().begin(session, known, kept, stored_len)
        self._clear_states(session)
        return rows

    def reserve(self, session: Session) -> bool:
        starts = session.lease is None
        if not super().reserve(session):
            return False
        if starts:
            self._clear_states(session)
        return True

    @torch.inference_mode()
    def extend(self, sessions: Sequence[Session], max_rows: int, keep: int = 0) -> None:
        chunks = take_chunks(sessions, max_rows, keep)
        if not chunks or self._extended(chunks):
            return
        model, waiting = self._model, self._waiting_rows(chunks)
        features = take_features(chunks, model.device, model.dtype)
        parts = list(features.split_with_sizes([chunk.count for chunk in chunks]))
        after: list[list[torch.Tensor]] = []
        # Each layer is one row behind the layer before it, because the token for its newest row is not known
        # yet.
        for layer in range(model.stages):
            if layer and waiting is not None:
                parts = [waiting.join(index, layer, outputs) for index, outputs in enumerate(parts)]
            parts = self._run_layer(layer, chunks, parts, waiting)
            # A layer without rows has no state yet. `features[0]` takes the state's place and is never read.
            after.append([outputs[-1] if outputs.shape[0] else features[0] for outputs in parts])
        if waiting is not None:
            waiting.keep(after[:-1])
        finish_chunks(chunks, [state.clone() for state in after[0]])

    @torch.inference_mode()
    def _clear_states(self, session: Session) -> None:
        """Forget the states of the sequence that had the place of a session's lease before this session."""
        if self._grower.stage_states is not None and session.lease is not None:
            self._grower.stage_states.clear(session.lease.first_new_page)

    def _waiting_rows(self, chunks: Sequence[RowChunk]) -> _WaitingRows | None:
        kept = self._grower.stage_states
        return None if kept is None else _WaitingRows(kept, chunks, self._device)

    def _run_layer(
        self,
        layer: int,
        chunks: Sequence[RowChunk],
        inputs: Sequence[torch.Tensor],
        waiting: _WaitingRows | None,
    ) -> list[torch.Tensor]:
        """Run one layer over the new rows that it has in each chunk.

        Args:
            layer: Index of the layer.
            chunks: The chunks.
            inputs: For each chunk, the states that the layer pairs with tokens, ``[rows, hidden]``. The last
                row is at position ``chunk.stop - 1 - layer``.
            waiting: The states that were kept from the previous extension. None if there is only one layer.

        Returns:
            The layer's states for each chunk, ``[rows, hidden]``.
        """
        tokens: list[int] = []
        positions: list[int] = []
        starts: list[int] = []
        working: list[RowChunk] = []
        for chunk, states in zip(chunks, inputs, strict=True):
            if states.shape[0]:
                stop = chunk.stop - layer
                start = stop - states.shape[0]
                tokens += chunk.session.tokens[start + 1 + layer : stop + 1 + layer]
                positions += range(start, stop)
                starts.append(start)
                working.append(chunk)
        if not working:
            return list(inputs)
        counts = [states.shape[0] for states in inputs]
        host = torch.tensor([tokens, positions], dtype=torch.int32).to(self._device)
        batch = build_batch(self._pool, leases_of(working), starts, [count for count in counts if count])
        if layer and waiting is not None:
            batch = replace(batch, slots=waiting.new_slots(layer, batch.slots, counts))
        self._attention.plan(batch)
        (run,) = self._model.passes(host[1], [len(tokens)], [layer], self._attention, self._pool)
        return list(run(host[0], torch.cat(list(inputs)), None).split_with_sizes(counts))


class _WaitingRows:
    """Each layer's last row of the previous extension. Its state had to wait for the next token.

    Rounds on the device may have computed rows that the host has not computed. These rows are not changed.

    Args:
        kept: The states of the waiting rows.
        chunks: The chunks of the extension.
        device: Device of the states.
    """

    def __init__(self, kept: StageStates, chunks: Sequence[RowChunk], device: torch.device) -> None:
        self._kept = kept
        self._chunks = chunks
        self._places = upload([lease.first_new_page for lease in leases_of(chunks)], torch.int64, device)
        stops, counts, started = upload(
            [
                [chunk.stop for chunk in chunks],
                [chunk.count for chunk in chunks],
                [int(chunk.start > chunk.session.inherited_rows) for chunk in chunks],
            ],
            torch.int32,
            device,
        )
        self._stops = stops
        self._states = kept.read(self._places)
        # If nothing was computed since the session was opened, the kept state is not valid, and all rows are
        # new.
        self._new = torch.where(started > 0, kept.fresh_rows(self._places, stops, counts), counts)

    def _waited(self, index: int, layer: int) -> bool:
        """True if the previous layer has had rows since the session was opened. Its last row then waits."""
        chunk = self._chunks[index]
        return chunk.start - layer >= chunk.session.inherited_rows

    def join(self, index: int, layer: int, outputs: torch.Tensor) -> torch.Tensor:
        """Return the input states of an MTP layer for one prompt chunk.

        These are the states of the previous layer for this chunk, without the newest state. The token for the
        newest state is not known yet. If the previous chunk left such a state, that state comes first.

        Args:
            index: Index of the chunk.
            layer: Index of the layer, at least 1.
            outputs: ``[rows, hidden]``, states of the previous layer.
        """
        if not self._waited(index, layer):
            return outputs[:-1]
        last = self._states[index : index + 1, layer - 1]
        return after_last(outputs[None], last, self._new[index : index + 1])[0]

    def new_slots(self, layer: int, slots: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        """Return the KV slots to write, with -1 for each row that a round on the device has already computed.

        Args:
            layer: Index of the layer, at least 1.
            slots: ``[sum(counts)] int64``, the KV slots of the layer's rows, chunk by chunk.
            counts: The number of rows of each prompt chunk.
        """
        parts = slots.split_with_sizes(list(counts))
        return torch.cat(
            [
                fresh_slots(part, self._new[index : index + 1]) if self._waited(index, layer) else part
                for index, part in enumerate(parts)
            ]
        )

    def keep(self, states: Sequence[Sequence[torch.Tensor]]) -> None:
        """Keep the states of each chunk's last row. They are given for every layer but the last one."""
        fresh = torch.stack([torch.stack(list(of)) for of in states], 1)
        self._kept.keep(self._places, fresh, self._stops, self._new)
