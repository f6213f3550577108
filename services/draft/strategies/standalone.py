"""Drafting with a model of its own: any decoder that `shared.nn` loads, if it speaks the target's token ids. It takes no features.

Its rows are the committed tokens themselves, the root included: the row at position t is token t, and the tree grows from the root's row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from outrider.services.draft.growth.growing_model import ONE_STAGE, LevelPass, Stage
from outrider.services.draft.growth.round_model import DecoderRounds
from outrider.services.draft.sessions.chunks import finish_chunks, last_states, leases_of, take_chunks
from outrider.services.draft.sessions.session import RowSource, Session
from outrider.services.draft.strategies.base import StrategyInfo
from outrider.services.draft.strategies.paged import PagedStrategy, longest_session
from outrider.services.draft.target_info import TargetInfo
from outrider.services.draft.vocab import DraftVocabulary
from outrider.shared.attn.base import AttentionBackend, build_batch
from outrider.shared.base.errors import CheckpointError
from outrider.shared.kv.pool import KVPool
from outrider.shared.nn.decoder import Decoder
from outrider.shared.nn.fused.products import ProductUse
from outrider.shared.nn.layers.blocks import Linear
from outrider.shared.spec.drafter import FeatureSpec
from outrider.shared.spec.tree import DraftShape


class DecoderGrowth:
    """`GrowingModel` of a decoder: what a row needs of its ancestors is in their K/V, so states are for the logits alone.

    Args:
        decoder: The draft model.
        vocabulary: The ids that both models know.
    """

    def __init__(self, decoder: Decoder, vocabulary: DraftVocabulary) -> None:
        self.decoder = decoder
        self.vocabulary = vocabulary
        self.device = decoder.device
        # The rows of the output head that it may name; None: all of them.
        cut = vocabulary.size < decoder.config.vocab_size
        self._head = Linear(decoder.lm_head[vocabulary.target_ids(decoder.device)]) if cut else None

    def stage(self, level: int) -> Stage:
        """See `GrowingModel.stage`."""
        return ONE_STAGE

    def level_passes(
        self, positions: torch.Tensor, stages: Sequence[Stage], attention: AttentionBackend, pool: KVPool
    ) -> Sequence[LevelPass]:
        """See `GrowingModel.level_passes`."""

        def level(rows: torch.Tensor) -> LevelPass:
            return lambda tokens, _: self.decoder.forward(tokens, rows, attention, pool).hidden

        return [level(rows) for rows in positions]

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """See `GrowingModel.logits`."""
        return self.decoder.logits(states) if self._head is None else self._head(states)


@dataclass(frozen=True, slots=True)
class StandaloneVocabulary:
    """What is known of the target's token ids.

    Attributes:
        target_size: Its vocabulary, or None while unknown.
        same_tokenizer: The tokenizers were compared and are equal: vocabularies may then differ by rows that no token has.
        token_map: Target ids that the draft may name, or None for all.
    """

    target_size: int | None = None
    same_tokenizer: bool = False
    token_map: torch.Tensor | None = None

    def check(self, draft_size: int, target_size: int) -> None:
        """Raise `CheckpointError` if a draft model of that vocabulary cannot draft for the target."""
        if target_size != draft_size and not self.same_tokenizer:
            raise CheckpointError(
                f"The draft model's vocab_size is {draft_size}, the target's {target_size}: a standalone draft needs the target's "
                "tokenizer. If they share it and only the padding differs, give both folders with their tokenizer.json (--draft, "
                "--target-weights).",
                field="vocab_size",
            )

    def of_draft(self, draft_size: int) -> DraftVocabulary:
        """Return what the draft may name."""
        size = min(draft_size, self.target_size or draft_size)
        return DraftVocabulary.from_token_map(self.token_map, size)


class StandaloneStrategy(PagedStrategy):
    """`DraftStrategy` of a draft model.

    Args:
        decoder: The draft model.
        pool: Its KV.
        attention: Its attention backend.
        model_id: Name of the checkpoint.
        max_shape: Largest tree that will be asked for.
        vocabulary: What is known of the target's.

    Raises:
        CheckpointError: the vocabularies differ; names the key.
    """

    def __init__(
        self,
        decoder: Decoder,
        pool: KVPool,
        attention: AttentionBackend,
        model_id: str,
        max_shape: DraftShape,
        vocabulary: StandaloneVocabulary,
    ) -> None:
        config = decoder.config
        self._vocabulary = vocabulary
        if vocabulary.target_size is not None:
            vocabulary.check(config.vocab_size, vocabulary.target_size)
        drafted = vocabulary.of_draft(config.vocab_size)
        info = StrategyInfo(
            algorithm="STANDALONE",
            model_id=model_id,
            fingerprint=decoder.fingerprint,
            vocab_size=config.vocab_size,
            feature_size=0,
            max_len=longest_session(pool, max_shape),
            row_source=RowSource.TOKENS,
            hidden_size=config.hidden_size,
        )
        growth = DecoderGrowth(decoder, drafted)
        super().__init__(
            info, growth, pool, attention, DecoderRounds(decoder, drafted, growth.logits), decoder.dtype
        )
        self._decoder = decoder

    def feature_spec(self, target: TargetInfo | None) -> FeatureSpec:
        """See `DraftStrategy.feature_spec`: nothing is captured."""
        if target is not None:
            self._vocabulary.check(self._decoder.config.vocab_size, target.vocab_size)
        return FeatureSpec(fingerprint=self.info.fingerprint)

    def missing(self) -> Mapping[str, tuple[int, ...]]:
        """See `DraftStrategy.missing`: nothing."""
        return {}

    def lend(self, name: str, tensor: torch.Tensor) -> None:
        """See `DraftStrategy.lend`."""
        raise CheckpointError(f"{name} is not wanted; a standalone draft borrows nothing.", field=name)

    def uses(self) -> list[ProductUse]:
        """See `HasProducts.uses`."""
        return [] if self._decoder.fused is None else self._decoder.fused.uses()

    @torch.inference_mode()
    def extend(self, sessions: Sequence[Session], max_rows: int, keep: int = 0) -> None:
        """See `DraftStrategy.extend`."""
        chunks = take_chunks(sessions, max_rows, keep)
        if not chunks or self._extended(chunks):
            return
        tokens = [token for chunk in chunks for token in chunk.session.tokens[chunk.start : chunk.stop]]
        positions = [position for chunk in chunks for position in range(chunk.start, chunk.stop)]
        host = torch.tensor([tokens, positions], dtype=torch.int32).to(self._device)
        starts, counts = [chunk.start for chunk in chunks], [chunk.count for chunk in chunks]
        self._attention.plan(build_batch(self._pool, leases_of(chunks), starts, counts))
        states = self._decoder.forward(host[0], host[1], self._attention, self._pool).hidden
        finish_chunks(chunks, last_states(chunks, states))
