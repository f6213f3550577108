"""Adds text to the traced rounds of a request: the text of each draft node and of each emitted token."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace

from tokenizers import Tokenizer

from outrider.services.gateway.detokenizer import CONTEXT_TOKENS, IncrementalDecoder
from outrider.services.gateway.request import StopRules
from outrider.shared.base.generation import RoundTrace

BROKEN = "\N{REPLACEMENT CHARACTER}"


class TraceTexts:
    """Adds texts to the rounds of one sequence whose request asked for a trace.

    First call `emit` with the tokens of the prefill. Then call `describe` with each round, in order.

    The joined texts of all emitted tokens equal the text of the sequence, except for the token that ends the
    sequence. This token is not part of the answer's text, but has the same text as a tree node of this token,
    such as ``<|im_end|>``. A token that ends inside a character has no text. The text belongs to the token
    that completes the character. A tree node whose token ends inside a character has the text U+FFFD.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int],
        rules: StopRules,
        silent_token_ids: frozenset[int],
    ) -> None:
        """Create the texts of one sequence.

        Args:
            tokenizer: Decodes the tokens.
            prompt_ids: The prompt. Its last tokens are the context in which the first root is decoded.
            rules: Text options of the request.
            silent_token_ids: Tokens that end the sequence. The answer's text does not contain them.
        """
        self._tokenizer = tokenizer
        self._decoder = IncrementalDecoder(tokenizer, rules.skip_special_tokens)
        self._silent = silent_token_ids
        self._last = deque(prompt_ids[-CONTEXT_TOKENS:], maxlen=CONTEXT_TOKENS)

    def emit(self, token_ids: Sequence[int]) -> tuple[str, ...]:
        """Append emitted tokens to the sequence.

        Return, for each token, the text that the token completes.
        """
        texts = []
        for token in token_ids:
            if token in self._silent:
                texts.append(self._decoder.flush() + self._text_after(list(self._last), token))
            else:
                texts.append(self._decoder.push(token))
            self._last.append(token)
        return tuple(texts)

    def describe(self, one: RoundTrace, token_ids: Sequence[int]) -> RoundTrace:
        """Append the tokens of a round to the sequence, and return the round with its texts.

        Args:
            one: The trace of the round.
            token_ids: The tokens of the round that belong to the answer. If a stop token cuts the round, the
                emitted tokens after it are left out.
        """
        texts = self._node_texts(one)
        nodes = [replace(node, text=text) for node, text in zip(one.nodes, texts, strict=True)]
        return replace(one, nodes=nodes, emitted_text=self.emit(token_ids))

    def _node_texts(self, one: RoundTrace) -> list[str]:
        # The text of a token can depend on its neighbors. For example, a leading space is lost at the start
        # of a text. Each path is therefore decoded together with the last tokens of the sequence before it.
        context = list(self._last)[:-1]
        before = self._decode(context)
        paths: list[list[int]] = []
        wholes: list[str] = []
        texts: list[str] = []
        for node in one.nodes:
            above = node.parent
            path = [*(context if above < 0 else paths[above]), node.token]
            whole = self._decode(path)
            texts.append(self._last_text(before if above < 0 else wholes[above], whole, node.token))
            paths.append(path)
            wholes.append(whole)
        return texts

    def _text_after(self, context: list[int], token: int) -> str:
        return self._last_text(self._decode(context), self._decode([*context, token]), token)

    def _last_text(self, before: str, whole: str, token: int) -> str:
        """Return the text of a token, given the texts before it and with it."""
        stem = before.rstrip(BROKEN)
        return whole[len(stem) :] if whole.startswith(stem) else self._decode([token])

    def _decode(self, token_ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=False))
