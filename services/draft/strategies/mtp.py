"""Drafting with the multi-token prediction (MTP) layers of the target's own checkpoint.

Layer m (from 0) works on pairs. At position t, the layer pairs the token t + 1 + m with the state of
layer m - 1 at t, and predicts the token t + 2 + m. Layer 0 uses the target's last hidden state after the
final norm. Each layer has its own K/V, in a plane of the pool. With C committed tokens, layer m has C - 1 - m
rows.

Layer i runs level i of a tree. Levels beyond the last layer repeat that layer on its own previous state, as
is usual for models with one MTP layer.

Layer m lags m rows behind the sequence. For m >= 2, there are therefore m - 1 rows between its stable rows
and the row of a node at level m. These rows belong to the node's ancestors, and the tokens of these rows are
drafted too. So when layer m takes over at level m, layer m first runs the rows of the earlier levels; see
`growing_model.Stage`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch.nn import functional

from outrider.services.draft.growth.growing_model import GrowingModel, LevelPass, Stage, split_rotation
from outrider.services.draft.sessions.chunks import RowChunk, leases_of, take_chunks, take_features
from outrider.services.draft.sessions.session import Session
from outrider.services.draft.strategies.base import StrategyInfo
from outrider.services.draft.strategies.mtp_layers import MtpWeights
from outrider.services.draft.strategies.paged import PagedStrategy, longest_session
from outrider.services.draft.target_info import TargetInfo
from outrider.services.draft.vocab import DraftVocabulary
from outrider.shared.attn.base import AttentionBackend, build_batch
from outrider.shared.base.errors import CheckpointError
from outrider.shared.kv.pool import KVPool
from outrider.shared.nn.decoder import EMBEDDING, LM_HEAD
from outrider.shared.nn.layers.modules import Linear
from outrider.shared.nn.layers.rope import RotaryEmbedding, Rotation
from outrider.shared.spec.drafter import FeatureSpec
from outrider.shared.spec.tree import DraftShape

FINGERPRINT = "final_hidden"
"""Fingerprint of raw features. The target stores its last hidden state, which is independent of the MTP
layers."""


class MtpModel(GrowingModel):
    """A chain of MTP layers, each of which is one stage of the tree's growth.

    Args:
        weights: The layers.
        device, dtype: Device and type to compute with.
        token_map: The only target ids to draft, or None for all.
    """

    def __init__(
        self,
        weights: MtpWeights,
        device: torch.device,
        dtype: torch.dtype,
        token_map: torch.Tensor | None = None,
    ) -> None:
        config = weights.config
        self.weights = weights
        self.device = device
        self.dtype = dtype
        self.vocabulary = DraftVocabulary.from_token_map(token_map, config.vocab_size)
        self._rope = RotaryEmbedding(config.rope, config.rotary_dim, device, dtype)
        self._embedding: torch.Tensor | None = None
        self._lm_head: Linear | None = None

    @property
    def depth(self) -> int:
        """The number of MTP layers."""
        return len(self.weights.layers)

    def make_pool(self, num_pages: int, page_size: int) -> KVPool:
        """Create a pool with a plane, or a pair of planes for K and V, for each layer."""
        config = self.weights.config
        return KVPool(
            num_pages, page_size, self.depth, config.num_kv_heads, config.head_dim, self.dtype, self.device,
            latent=config.latent is not None,
        )  # fmt: skip

    def missing(self) -> dict[str, tuple[int, ...]]:
        """Return the names and shapes of the tensors still to be lent: the target's embedding and lm_head."""
        shape = (self.weights.config.vocab_size, self.weights.config.hidden_size)
        return {
            name: shape
            for name, held in ((EMBEDDING, self._embedding), (LM_HEAD, self._lm_head))
            if held is None
        }

    def lend(self, name: str, tensor: torch.Tensor) -> None:
        """Store a tensor borrowed from the target.

        Raises:
            CheckpointError: The tensor is not missing, or its shape is wrong.
        """
        shape = self.missing().get(name)
        if shape is None:
            raise CheckpointError(
                f"The MTP layers do not borrow {name}; still missing: "
                f"{', '.join(self.missing()) or 'nothing'}.",
                field=name,
            )
        if tuple(tensor.shape) != shape:
            raise CheckpointError(
                f"The target's {name} has shape {list(tensor.shape)}, but the MTP layers need {list(shape)}. "
                "Serve the target that the layers belong to.",
                field=name,
            )
        tensor = tensor.to(device=self.device, dtype=self.dtype)
        if name == EMBEDDING:
            self._embedding = tensor
        else:
            self._lm_head = Linear(
                tensor if self.vocabulary.d2t is None else tensor[self.vocabulary.target_ids(self.device)]
            )

    def stage(self, level: int) -> Stage:
        return Stage(behind=min(level, self.depth - 1))

    def level_passes(
        self, positions: torch.Tensor, stages: Sequence[Stage], attention: AttentionBackend, pool: KVPool
    ) -> Sequence[LevelPass]:
        rotations = split_rotation(self._rope(positions.view(-1)), positions.shape[0])
        return [
            partial(
                self._run, stage.behind, rotation=rotation, positions=rows, attention=attention, pool=pool
            )
            for stage, rotation, rows in zip(stages, rotations, positions, strict=True)
        ]

    def run(
        self,
        layer: int,
        tokens: torch.Tensor,
        states: torch.Tensor,
        positions: torch.Tensor,
        attention: AttentionBackend,
        pool: KVPool,
    ) -> torch.Tensor:
        """Run one layer over rows ``tokens, positions [rows]`` and ``states [rows, hidden]``.

        The attention backend must be planned for these rows.
        """
        return self._run(layer, tokens, states, self._rope(positions), positions, attention, pool)

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        assert self._lm_head is not None, "lm_head is missing; lend() it first"
        return self._lm_head(states)

    def _run(
        self,
        layer: int,
        tokens: torch.Tensor,
        states: torch.Tensor,
        rotation: Rotation,
        positions: torch.Tensor,
        attention: AttentionBackend,
        pool: KVPool,
    ) -> torch.Tensor:
        assert self._embedding is not None, "the embedding is missing; lend() it first"
        embedded = functional.embedding(tokens, self._embedding)
        if self.weights.dialect.blind_start:
            # These families treat the embedding at position 0 as zero.
            embedded = embedded * (positions != 0)[:, None]
        return self.weights.layers[layer](embedded, states, rotation, attention, pool)


class MtpStrategy(PagedStrategy):
    """Drafts with MTP layers.

    Args:
        model: The layers.
        pool: KV pool made by `MtpModel.make_pool`.
        attention: Attention backend for this pool.
        model_id: Name of the checkpoint.
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
            # Layer m continues from the last state of layer m - 1, which a reopened session no longer has.
            # Layer 0 computes m earlier rows again to supply that state.
            rewind=model.depth - 1,
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

    @torch.inference_mode()
    def extend(self, sessions: Sequence[Session], max_rows: int, keep: int = 0) -> None:
        # `last_state [layers, hidden]` contains the state of the last row of each layer that has rows.
        chunks = take_chunks(sessions, max_rows, keep)
        if not chunks:
            return
        model = self._model
        before = [chunk.session.last_state for chunk in chunks]
        after: list[list[torch.Tensor]] = [[] for _ in chunks]
        parts = list(
            take_features(chunks, model.device, model.dtype).split_with_sizes(
                [chunk.count for chunk in chunks]
            )
        )
        # Each layer lags one row behind the layer before, because the token for its newest row is not known
        # yet.
        for layer in range(model.depth):
            if layer:
                parts = [
                    _inputs(outputs, states, layer) for outputs, states in zip(parts, before, strict=True)
                ]
            parts = self._run_layer(layer, chunks, parts)
            for states, outputs in zip(after, parts, strict=True):
                states += outputs[-1:].unbind(0)
        for chunk, states in zip(chunks, after, strict=True):
            chunk.session.cached_rows += chunk.count
            chunk.session.last_state = torch.stack(states)

    def _run_layer(
        self, layer: int, chunks: Sequence[RowChunk], inputs: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Run a layer over its new rows of each chunk.

        Args:
            layer: Index of the layer.
            chunks: The chunks.
            inputs: For each chunk ``[rows, hidden]``, the states that the layer pairs with tokens. The last
                row is at position ``chunk.stop - 1 - layer``.

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
        self._attention.plan(
            build_batch(self._pool, leases_of(working), starts, [count for count in counts if count])
        )
        states = self._model.run(
            layer, host[0], torch.cat(list(inputs)), host[1], self._attention, self._pool
        )
        return list(states.split_with_sizes(counts))

    def _root_state(self, session: Session) -> torch.Tensor | None:
        return None if session.last_state is None else session.last_state[0]

    def _stage_states(self, sessions: Sequence[Session]) -> torch.Tensor | None:
        depth = self._model.depth
        if depth <= 2:
            return None
        states = [session.last_state for session in sessions if session.last_state is not None]
        # No tree row continues from the state of a layer without rows, so padding is never read.
        return torch.stack([functional.pad(rows, (0, 0, 0, depth - rows.shape[0])) for rows in states])


def _inputs(outputs: torch.Tensor, before: torch.Tensor | None, layer: int) -> torch.Tensor:
    """Return the input states of a layer's new rows: all states of the layer before except the newest state.

    Args:
        outputs: ``[rows, hidden]``, new states of the layer before. The last row must wait: the token that
            this layer would pair it with is not known yet.
        before: ``[layers, hidden]``, states of the last rows in the previous call, for the layers that had
            rows; None in the first call. In any other call, the row that waited in the previous call comes
            first.
        layer: Index of the layer, at least 1.
    """
    if before is not None and before.shape[0] >= layer:
        return torch.cat([before[layer - 1 : layer], outputs[:-1]])
    return outputs[:-1]
