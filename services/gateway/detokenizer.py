"""Token ids → text, piece by piece: no piece ends inside a code point, none is ever taken back, and text stays aligned with its tokens."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from outrider.services.gateway.request import Chunk, StopRules
from outrider.services.gateway.stop import StopMatcher

# A code point has at most four bytes, so at most four byte tokens. Tokens that stay undecodable for longer are not UTF-8 at all.
MAX_HELD_TOKENS = 8
CONTEXT_TOKENS = 8


class IncrementalDecoder:
    """Decodes one sequence. The pieces put together equal the tokenizer's decoding of the whole sequence.

    The exception are bytes that never become valid UTF-8: they are let go as U+FFFD after `MAX_HELD_TOKENS` tokens or at the end.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._stream = DecodeStream(skip_special_tokens=skip_special_tokens)
        self._context: deque[int] = deque(maxlen=CONTEXT_TOKENS)
        self._held: list[int] = []
        self._num_undecodable = 0

    def push(self, token_id: int) -> str:
        """Return the text that `token_id` completes, possibly none."""
        self._held.append(token_id)
        try:
            piece = self._stream.step(self._tokenizer, token_id)
        except Exception:
            # The stream refuses sequences whose earlier text changes under it (it raises a bare Exception).
            return self.flush()
        if piece is None:
            # Tokens without text (skipped special tokens) wait for the next text; only undecodable ones are counted.
            self._num_undecodable += bool(self._decode([token_id]))
            return self.flush() if self._num_undecodable > MAX_HELD_TOKENS else ""
        self._settle()
        return str(piece)

    def flush(self) -> str:
        """Return the text of the tokens held back, broken code points as U+FFFD, and start afresh after them."""
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
    """Tokens whose text ends at `end` of the unreleased buffer."""

    token_ids: list[int]
    end: int


class TextAssembler:
    """Turns a sequence's tokens into chunks: decodes, holds back what may become a stop string, and cuts at one.

    A token is released with the last of its text, never before. Without a tokenizer the chunks carry ids and no text.
    """

    def __init__(
        self, tokenizer: Tokenizer | None, rules: StopRules, silent_token_ids: frozenset[int]
    ) -> None:
        """`silent_token_ids` end the sequence and have no text (EOS, stop tokens), whatever the tokenizer says of them."""
        self._decoder = IncrementalDecoder(tokenizer, rules.skip_special_tokens) if tokenizer else None
        self._matcher = StopMatcher(rules.strings, rules.include_stop_string)
        self._silent = silent_token_ids
        self._text = ""
        self._pending: deque[_Pending] = deque()
        self._undecoded: list[int] = []
        self.num_tokens = 0
        self.matched_stop: str | None = None

    def push(self, token_ids: Iterable[int]) -> Chunk:
        """Take emitted tokens and return what may be shown now. After a match, further tokens are dropped."""
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
            more_text, more_tokens = self._append(piece)
            text += more_text
            released += more_tokens
        return Chunk(text, tuple(released))

    def finish(self) -> Chunk:
        """Return everything still held back; the sequence has ended."""
        text = ""
        released: list[int] = []
        if self._decoder is not None and self.matched_stop is None:
            text, released = self._append(self._decoder.flush())
        if self.matched_stop is None:
            text += self._text
        released += [token for group in self._pending for token in group.token_ids] + self._undecoded
        self._text = ""
        self._pending.clear()
        self._undecoded.clear()
        return Chunk(text, tuple(released))

    def _append(self, piece: str) -> tuple[str, list[int]]:
        if not piece:
            return "", []
        self._text += piece
        self._pending.append(_Pending(self._undecoded, len(self._text)))
        self._undecoded = []
        scan = self._matcher.scan(self._text)
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
