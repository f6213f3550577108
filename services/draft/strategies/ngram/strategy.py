"""Drafting with n-grams (prompt lookup): proposes tokens that followed earlier occurrences of a suffix.

A suffix consists of the last tokens of a sequence. N-gram drafting needs no model, no features and no KV.
Longer, more frequent and later matches take precedence in the tree. Sources: SGLang's NGRAM algorithm; prompt
lookup decoding (A. Saxena, 2023).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from outrider.services.draft.growth.draft_graph import DeviceGrowth
from outrider.services.draft.sessions.session import PeerId, RowSource, Session
from outrider.services.draft.strategies.base import DraftStrategy, Pages, StrategyInfo
from outrider.services.draft.strategies.ngram.corpus import Corpus
from outrider.services.draft.strategies.ngram.match import (
    MAX_MATCHES,
    ContinuationTrie,
    TokenHistory,
    find_matches,
)
from outrider.services.draft.target_info import TargetInfo
from outrider.shared.base.errors import CheckpointError
from outrider.shared.spec.drafter import FeatureSpec
from outrider.shared.spec.tree import DraftBatch, DraftShape
from outrider.shared.spec.trees import HostTree, pad_trees

ANY_VOCABULARY = (1 << 31) - 1
MAX_LEN = 1 << 24


@dataclass(frozen=True, slots=True)
class NgramOptions:
    """Limits of n-gram matching.

    Attributes:
        min_match, max_match: Smallest and largest number of matching context tokens that counts.
    """

    min_match: int = 1
    max_match: int = 12


class NgramStrategy(DraftStrategy):
    """Drafting with n-grams, without a model.

    Args:
        options: Limits of matching.
        vocab_size: Size of the target's vocabulary. None if the size is not known yet.
        corpus: Texts to search in addition to the sequence itself. None if there are none.
        device: Device of the returned trees.
    """

    def __init__(
        self, options: NgramOptions, vocab_size: int | None, corpus: Corpus | None, device: torch.device
    ) -> None:
        self.growth: DeviceGrowth | None = None
        self._options = options
        self._corpus = corpus
        self._device = device
        self._histories: dict[tuple[PeerId, int], tuple[int, TokenHistory]] = {}
        if corpus is not None and vocab_size is not None:
            _check_corpus(corpus, vocab_size)
        digest = hashlib.sha256(
            repr(options).encode() + (corpus.tokens.tobytes() if corpus is not None else b"")
        )
        self.info = StrategyInfo(
            algorithm="NGRAM",
            model_id="ngram",
            fingerprint=digest.hexdigest(),
            vocab_size=vocab_size or ANY_VOCABULARY,
            feature_size=0,
            max_len=MAX_LEN,
            row_source=RowSource.NONE,
        )

    def feature_spec(self, target: TargetInfo | None) -> FeatureSpec:
        # No features are captured.
        if target is not None and self._corpus is not None:
            _check_corpus(self._corpus, target.vocab_size)
        return FeatureSpec(fingerprint=self.info.fingerprint)

    def missing(self) -> Mapping[str, tuple[int, ...]]:
        return {}

    def lend(self, name: str, tensor: torch.Tensor) -> None:
        raise CheckpointError(f"N-grams borrow no tensors, so {name} is not needed.", field=name)

    def reserve(self, session: Session) -> bool:
        return True

    def begin(self, session: Session, known: Session | None, kept: int, stored_len: int) -> int:
        """Return 0: there are no rows."""
        return 0

    def extend(self, sessions: Sequence[Session], max_rows: int, keep: int = 0) -> None:
        """Do nothing: there are no rows."""

    def propose(self, sessions: Sequence[Session]) -> DraftBatch:
        shapes = [session.ask.shape.bounded() for session in sessions if session.ask is not None]
        return pad_trees(
            [self._tree(session, shape) for session, shape in zip(sessions, shapes, strict=True)],
            self._device,
        )

    def release(self, session: Session) -> None:
        self._histories.pop((session.peer, session.session_id), None)

    def pages(self) -> Pages:
        return Pages(0, 0, 0)

    def _tree(self, session: Session, shape: DraftShape) -> HostTree:
        options = self._options
        text = self._history(session).tokens
        matches = find_matches(text, options.min_match, options.max_match)
        if self._corpus is not None:
            found = self._corpus.find(text, options.min_match, options.max_match)
            matches = sorted([*matches, *found], key=lambda match: -match.weight)[:MAX_MATCHES]
        return ContinuationTrie(matches, shape.depth).tree(session.tokens[-1], shape)

    def _history(self, session: Session) -> TokenHistory:
        key = (session.peer, session.session_id)
        epoch, history = self._histories.get(key, (-1, TokenHistory()))
        if epoch != session.epoch:
            history = TokenHistory()
            self._histories[key] = session.epoch, history
        history.extend(session.tokens[history.length :])
        return history


def _check_corpus(corpus: Corpus, vocab_size: int) -> None:
    if corpus.max_token >= vocab_size:
        raise CheckpointError(
            f"ngram_corpus contains token {corpus.max_token}, but the target's vocabulary ends at "
            f"{vocab_size - 1}. Make the corpus with the target's tokenizer.",
            field="ngram_corpus",
        )
