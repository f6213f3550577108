"""Drafting with a standalone model: any decoder that `shared.nn` loads and that has the target's token ids.

The model needs no features. Its input rows are the committed tokens themselves, including the root. The row
at position t is the token at t. The tree grows from the row of the root.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from outrider.services.draft.growth.draft_model import DecoderModel
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
from outrider.shared.nn.fused.products import HasProducts, ProductUse
from outrider.shared.spec.drafter import FeatureSpec
from outrider.shared.spec.tree import DraftShape


@dataclass(frozen=True, slots=True)
class StandaloneVocabulary:
    """The target's token ids, as far as the draft knows them.

    Attributes:
        target_size: Size of the target's vocabulary. None if the size is not known yet.
        same_tokenizer: True if the tokenizers of draft and target were compared and are equal. The vocabulary
            sizes of the two models may then differ by padding rows.
        token_map: The target ids that the draft may propose. With None, it may propose all ids.
    """

    target_size: int | None = None
    same_tokenizer: bool = False
    token_map: torch.Tensor | None = None

    def check(self, draft_size: int, target_size: int) -> None:
        """Check that a draft model with this vocabulary can draft for the target.

        Raises:
            CheckpointError: The vocabulary sizes differ, and the tokenizers of the two models are not known
                to be equal.
        """
        if target_size != draft_size and not self.same_tokenizer:
            raise CheckpointError(
                f"The draft model's vocab_size is {draft_size}, but the target's is {target_size}. "
                "A standalone draft needs the target's tokenizer. If they share it and only the padding "
                "differs, give both folders with their tokenizer.json (--draft, --target-weights).",
                field="vocab_size",
            )

    def of_draft(self, draft_size: int) -> DraftVocabulary:
        """Return the tokens that a draft model of this size may propose."""
        size = min(draft_size, self.target_size or draft_size)
        return DraftVocabulary.from_token_map(self.token_map, size)


class StandaloneStrategy(PagedStrategy, HasProducts):
    """Drafting with a standalone model.

    Args:
        decoder: The draft model.
        pool: The draft model's KV pool.
        attention: Attention backend for this pool.
        model_id: Name of the draft model's checkpoint.
        max_shape: Largest tree that can be requested.
        vocabulary: The target's token ids, as far as they are known.

    Raises:
        CheckpointError: The vocabularies differ. The message names the key.
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
        super().__init__(info, DecoderModel(decoder, drafted), pool, attention)
        self._decoder = decoder

    def feature_spec(self, target: TargetInfo | None) -> FeatureSpec:
        # No features are captured.
        if target is not None:
            self._vocabulary.check(self._decoder.config.vocab_size, target.vocab_size)
        return FeatureSpec(fingerprint=self.info.fingerprint)

    def missing(self) -> Mapping[str, tuple[int, ...]]:
        return {}

    def lend(self, name: str, tensor: torch.Tensor) -> None:
        raise CheckpointError(f"A standalone draft borrows no tensors, so {name} is not needed.", field=name)

    def uses(self) -> list[ProductUse]:
        return [] if self._decoder.fused is None else self._decoder.fused.uses()

    @torch.inference_mode()
    def extend(self, sessions: Sequence[Session], max_rows: int, keep: int = 0) -> None:
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
