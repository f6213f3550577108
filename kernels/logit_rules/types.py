"""Data types of logit_rules: the rules and the output of every slot, and the rules of packed rows."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

COUNT_MASK = (1 << 24) - 1
"""Bits of a word that count how often the output contains the token."""
IN_PROMPT = 1 << 28
"""Flag of a word: the prompt contains the token."""
ENDS = 1 << 29
"""Flag of a word: the token ends the text, so it is forbidden before the minimum length."""
FORBIDDEN = 1 << 30
"""Flag of a word: the token is always forbidden."""
TAIL = 64
"""Number of the newest output tokens that a slot keeps, to find bad words of several tokens."""


@dataclass(frozen=True, slots=True)
class RuleState:
    """The penalties, biases and forbidden tokens of each slot, and the tokens that the slot has generated.

    S is the number of slots, and V is the size of the vocabulary.

    Attributes:
        active: ``[S] int32``, 1 if the slot has rules. Nothing else is read for a slot without rules.
        words: ``[S, V] int32``; for each token, its count in the output and its flags (`IN_PROMPT` …).
        presence, frequency, repetition: ``[S] fp32``, the penalties. The values 0, 0 and 1 change nothing.
        first_ends: ``[S] int32``, index of the first token of the sequence that may end the text.
        starts: ``[S] int32``, index of the first output token, i.e. the length of the prompt.
        num_biases: ``[S] int32``, number of entries of the bias list.
        bias_tokens: ``[S, B] int32``, ascending; unused entries have the largest int32.
        bias_values: ``[S, B] fp32``.
        num_phrases: ``[S] int32``, number of bad words that have several tokens.
        phrase_starts: ``[S, P + 1] int32``, index in `phrase_tokens` of each bad word's first token.
        phrase_tokens: ``[S, T] int32``, the tokens of the bad words, one word after the other.
        tail: ``[S, TAIL] int32``; the output token at index i of the sequence is at ``i % TAIL``.
        tops: ``[S] int32``, number of alternatives whose logprobs the client wants; -1 for no logprobs.
    """

    active: torch.Tensor
    words: torch.Tensor
    presence: torch.Tensor
    frequency: torch.Tensor
    repetition: torch.Tensor
    first_ends: torch.Tensor
    starts: torch.Tensor
    num_biases: torch.Tensor
    bias_tokens: torch.Tensor
    bias_values: torch.Tensor
    num_phrases: torch.Tensor
    phrase_starts: torch.Tensor
    phrase_tokens: torch.Tensor
    tail: torch.Tensor
    tops: torch.Tensor


@dataclass(frozen=True, slots=True)
class RuleRows:
    """Rules for M rows of logits. Each row contains the logits that follow one tree node.

    Attributes:
        state: The rules of all slots.
        slots: ``[M] int32``, the slot of each row; -1 for a row without rules.
        depths: ``[M] int32``, number of draft tokens on the path from the root to the row's node.
        paths: ``[M, D] int32``, the draft tokens on that path, from the root on.
        num_banned: ``[M] int32``, number of tokens that would complete a bad word of several tokens.
        banned: ``[M, P] int32``, the tokens that `num_banned` counts.
    """

    state: RuleState
    slots: torch.Tensor
    depths: torch.Tensor
    paths: torch.Tensor
    num_banned: torch.Tensor
    banned: torch.Tensor

    def select(self, rows: slice | torch.Tensor) -> RuleRows:
        """Return the rules of some rows."""
        return replace(
            self,
            slots=self.slots[rows],
            depths=self.depths[rows],
            paths=self.paths[rows],
            num_banned=self.num_banned[rows],
            banned=self.banned[rows],
        )


@dataclass(frozen=True, slots=True)
class OutputRows:
    """The rows of logits from which the accepted tokens of a round were chosen.

    In both tensors, element ``starts[e] + c`` belongs to column c of the accepted path of entry e. Entry e's
    first packed row is ``starts[e]``.

    Attributes:
        rows: ``[M] int64``, packed row of the node in that column. Past the end of the path, it is any valid
            row.
        tops: ``[M] int32``, number of alternatives whose logprobs are wanted; -1 for no logprobs.
    """

    rows: torch.Tensor
    tops: torch.Tensor
