"""Incremental detokenization: converts token ids to text, piece by piece.

No piece ends inside a code point, and a released piece never changes. No token is released before its text.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from outrider.services.gateway.request import Chunk, StopRules
from outrider.services.gateway.stop import Scan, StopMatcher
from outrider.services.gateway.stop_regex import StopSearch

# A code point has at most four bytes and therefore at most four tokens. A longer undecodable run is not
# UTF-8.
MAX_HELD_TOKENS = 8
# Number of earlier tokens to decode together with held tokens. A token's text can depend on earlier tokens.
CONTEXT_TOKENS = 8


@lru_cache(maxsize=8)
def special_token_ids(tokenizer: Tokenizer) -> frozenset[int]:
    """Return the ids of the special tokens, which produce no text if special tokens are skipped."""
    added = tokenizer.get_added_tokens_decoder()
    return frozenset(token_id for token_id, token in added.items() if token.special)


class IncrementalDecoder:
    """An incremental detokenizer for one sequence.

    The joined pieces equal the tokenizer's decoding of the whole sequence. Bytes that never become valid
    UTF-8 are the only exception. They are released as U+FFFD after `MAX_HELD_TOKENS` tokens or at the end of
    the sequence.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._stream = DecodeStream(skip_special_tokens=skip_special_tokens)
        self._skipped = special_token_ids(tokenizer) if skip_special_tokens else frozenset()
        self._context: deque[int] = deque(maxlen=CONTEXT_TOKENS)
        self._held: list[int] = []
        self._num_undecodable = 0

    def push(self, token_id: int) -> str:
        """Return the text that `token_id` completes, or an empty string."""
        self._held.append(token_id)
        if token_id in self._skipped:
            # `DecodeStream` would decode all skipped tokens again with each token.
            return ""
        try:
            piece = self._stream.step(self._tokenizer, token_id)
        except Exception:
            # `DecodeStream` raises a bare Exception if a token changes the text of earlier tokens.
            return self.flush()
        if piece is None:
            # Skipped special tokens have no text and are held until text follows. Count only the other
            # tokens.
            self._num_undecodable += bool(self._decode([token_id]))
            return self.flush() if self._num_undecodable > MAX_HELD_TOKENS else ""
        self._settle()
        return str(piece)

    def flush(self) -> str:
        """Return the text of the held tokens and restart decoding. Incomplete code points become U+FFFD."""
        if not self._held:
            return ""
        context = list(self._context)
        before = self._decode(context)
        whole = self._decode([*context, *self._held])
        piece = whole[len(before) :] if whole.startswith(before) else self._decode(self._held)
        self._settle()
        self._stream = DecodeStream(list(self._context), self._skip_special_tokens)
        return piece

    def _settle(self) -> None:
        self._context.extend(self._held)
        self._held.clear()
        self._num_undecodable = 0

    def _decode(self, token_ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=self._skip_special_tokens))


@dataclass(slots=True)
class _Pending:
    """Held tokens whose text ends at offset `end` of the unreleased text."""

    token_ids: list[int]
    end: int


class TextAssembler:
    """Converts the tokens of one sequence to chunks of final text.

    Text that may become a stop string is held back. After a match, the text is cut at the stop string. After
    a match of a stop regex, the text ends with the token that completes the match. A token is released
    together with the last character of its text. Without a tokenizer, chunks contain token ids and no text.

    Attributes:
        num_tokens: Number of tokens added so far, without the tokens after a match.
        matched_stop: The stop string or stop regex that matched, or None.
    """

    def __init__(
        self, tokenizer: Tokenizer | None, rules: StopRules, silent_token_ids: frozenset[int]
    ) -> None:
        """Create an assembler.

        Args:
            tokenizer: Decodes the tokens. With None, chunks contain token ids only.
            rules: Stop strings, stop regexes and text options of the request.
            silent_token_ids: Tokens that end the sequence (EOS and stop tokens). They produce no text,
                although the tokenizer may have text for them.
        """
        self._decoder = IncrementalDecoder(tokenizer, rules.skip_special_tokens) if tokenizer else None
        self._matcher = StopMatcher(rules.strings, rules.include_stop_string)
        self._search = StopSearch(rules.regexes) if rules.regexes else None
        self._never_stops = not (rules.strings or rules.regexes)
        self._silent = silent_token_ids
        self._min_tokens = rules.min_tokens
        self._text = ""
        self._pending: deque[_Pending] = deque()
        self._undecoded: list[int] = []
        self.num_tokens = 0
        self.matched_stop: str | None = None

    def push(self, token_ids: Iterable[int]) -> Chunk:
        """Add emitted tokens and return a new chunk with what is now final. Ignore tokens after a match."""
        text = ""
        released: list[int] = []
        for token_id in token_ids:
            if self.matched_stop is not None:
                break
            self.num_tokens += 1
            if self._decoder is None:
                released.append(token_id)
                continue
            self._undecoded.append(token_id)
            piece = self._decoder.flush() if token_id in self._silent else self._decoder.push(token_id)
            if not piece:
                continue
            if self._never_stops:
                more_text, more_tokens, self._undecoded = piece, self._undecoded, []
            else:
                more_text, more_tokens = self._append(piece)
            text += more_text
            released += more_tokens
        return Chunk(text, released)

    def finish(self) -> Chunk:
        """Return all text and tokens that are still held back. Call this once the sequence has ended."""
        text = ""
        released: list[int] = []
        if self._decoder is not None and self.matched_stop is None and (piece := self._decoder.flush()):
            text, released = self._append(piece)
        if self.matched_stop is None:
            text += self._text
        released += [token for group in self._pending for token in group.token_ids] + self._undecoded
        self._text = ""
        self._pending.clear()
        self._undecoded.clear()
        return Chunk(text, released)

    def _append(self, piece: str) -> tuple[str, list[int]]:
        """Add the text of the undecoded tokens, and return the text and the tokens that are now final."""
        self._text += piece
        self._pending.append(_Pending(self._undecoded, len(self._text)))
        self._undecoded = []
        scan = self._matcher.scan(self._text)
        pattern = self._search.push(piece) if self._search else None
        if self.num_tokens <= self._min_tokens:
            if scan.matched is not None:
                scan = Scan(self._matcher.releasable(self._text))  # the text is too short to end here
        elif pattern is not None and scan.matched is None:
            scan = Scan(len(self._text), pattern)
        text, self._text = self._text[: scan.release], self._text[scan.release :]
        released: list[int] = []
        if scan.matched is not None:
            self.matched_stop = scan.matched
            released = [token for group in self._pending for token in group.token_ids]
            self._pending.clear()
            self._text = ""
            return text, released
        for group in self._pending:
            group.end -= scan.release
        while self._pending and self._pending[0].end <= 0:
            released += self._pending.popleft().token_ids
        return text, released
