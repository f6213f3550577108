"""Drafting with a model of its own: any decoder that `shared.nn` loads, if it speaks the target's token ids. It takes no features.

Its rows are the committed tokens themselves, the root included: the row at position t is token t, and the tree grows from the root's row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from outrider.services.draft.chunks import finish_chunks, leases_of, take_chunks
from outrider.services.draft.growth import ONE_STAGE, LevelPass, Stage
from outrider.services.draft.runner import PagedStrategy, longest_session
from outrider.services.draft.session import RowSource, Session
from outrider.services.draft.strategy import StrategyInfo, TargetInfo
from outrider.services.draft.vocab import DraftVocabulary
from outrider.shared.attn.base import AttentionBackend, build_batch
from outrider.shared.base.errors import CheckpointError
from outrider.shared.kv.pool import KVPool
from outrider.shared.nn.decoder import Decoder
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

    def stage(self, level: int) -> Stage:
        """See `GrowingModel.stage`."""
        return ONE_STAGE

    def level_passes(self, positions: torch.Tensor, attention: AttentionBackend, pool: KVPool) -> Sequence[LevelPass]:
        """See `GrowingModel.level_passes`."""

        def level(rows: torch.Tensor) -> LevelPass:
            return lambda tokens, _: self.decoder.forward(tokens, rows, attention, pool).hidden

        return [level(rows) for rows in positions]

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """See `GrowingModel.logits`."""
        logits = self.decoder.logits(states)
        return logits if logits.shape[1] == self.vocabulary.size else logits[:, : self.vocabulary.size].contiguous()


class StandaloneStrategy(PagedStrategy):
    """`DraftStrategy` of a draft model.

    Args:
        decoder: The draft model.
        pool: Its KV.
        attention: Its attention backend.
        model_id: Name of the checkpoint.
        max_shape: Largest tree that will be asked for.
        target_vocab_size: The target's, or None while unknown.
        same_tokenizer: The tokenizers were compared and are equal: vocabularies may then differ by rows that no token has.

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
        target_vocab_size: int | None,
        same_tokenizer: bool,
    ) -> None:
        config = decoder.config
        self._same_tokenizer = same_tokenizer
        self._vocab_size = config.vocab_size
        if target_vocab_size is not None:
            self._check_vocabulary(target_vocab_size)
        known = min(config.vocab_size, target_vocab_size or config.vocab_size)
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
        super().__init__(info, DecoderGrowth(decoder, DraftVocabulary.identity(known)), pool, attention)
        self._decoder = decoder

    def feature_spec(self, target: TargetInfo | None) -> FeatureSpec:
        """See `DraftStrategy.feature_spec`: nothing is captured."""
        if target is not None:
            self._check_vocabulary(target.vocab_size)
        return FeatureSpec(fingerprint=self.info.fingerprint)

    def missing(self) -> Mapping[str, tuple[int, ...]]:
        """See `DraftStrategy.missing`: nothing."""
        return {}

    def lend(self, name: str, tensor: torch.Tensor) -> None:
        """See `DraftStrategy.lend`."""
        raise CheckpointError(f"{name} is not wanted; a standalone draft borrows nothing.", field=name)

    @torch.inference_mode()
    def extend(self, sessions: Sequence[Session], max_rows: int) -> None:
        """See `DraftStrategy.extend`."""
        chunks = take_chunks(sessions, max_rows)
        if not chunks:
            return
        tokens = [token for chunk in chunks for token in chunk.session.tokens[chunk.start : chunk.stop]]
        positions = [position for chunk in chunks for position in range(chunk.start, chunk.stop)]
        host = torch.tensor([tokens, positions], dtype=torch.int32).to(self._device)
        starts, counts = [chunk.start for chunk in chunks], [chunk.count for chunk in chunks]
        self._attention.plan(build_batch(self._pool, leases_of(chunks), starts, counts))
        finish_chunks(chunks, self._decoder.forward(host[0], host[1], self._attention, self._pool).hidden)

    def _check_vocabulary(self, target_vocab_size: int) -> None:
        if target_vocab_size != self._vocab_size and not self._same_tokenizer:
            raise CheckpointError(
                f"The draft model's vocab_size is {self._vocab_size}, the target's {target_vocab_size}: a standalone draft needs the "
                "target's tokenizer. If they share it and only the padding differs, give both folders with their tokenizer.json (--draft, "
                "--target-weights).",
                field="vocab_size",
            )
