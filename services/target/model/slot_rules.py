"""Rules of all slots on the device: penalties, biases, forbidden tokens, and wanted logprobs.

The kernels in `kernels/logit_rules` read these rules before a token is chosen, and count the chosen tokens.
The host writes the rules of a sequence once, before its first token is chosen. The copies to the device are
enqueued after the rounds in flight. For a slot without rules, the kernels only load one flag.
"""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import numpy.typing as npt
import torch

from outrider.kernels.logit_rules import (
    ENDS,
    FORBIDDEN,
    IN_PROMPT,
    TAIL,
    RuleRows,
    RuleState,
    make_rule_state,
    record_outputs,
)
from outrider.services.target.scheduling.sequence import Sequence
from outrider.shared.base.logit_rules import MAX_BAD_WORDS, MAX_BAD_WORDS_TOKENS, MAX_BIASES
from outrider.shared.kv.upload import upload

_NUMBERS = ("active", "first_ends", "starts", "num_biases", "num_phrases", "tops")
_PENALTIES = ("presence", "frequency", "repetition")
_LAST = (1 << 31) - 1


class SlotRules:
    """The rules of the slots of one engine: penalties, biases, forbidden tokens and wanted logprobs.

    Engine thread only, under inference mode.

    Args:
        slots: Number of slots.
        vocab_size: Size of the vocabulary.
        device: Device of the rounds.

    Attributes:
        state: The rules as tensors at fixed addresses.
    """

    def __init__(self, slots: int, vocab_size: int, device: torch.device) -> None:
        self._device = device
        self._vocab_size = vocab_size
        with torch.inference_mode(False):
            made = make_rule_state(
                slots,
                vocab_size,
                device,
                biases=MAX_BIASES,
                phrases=MAX_BAD_WORDS,
                tokens=MAX_BAD_WORDS_TOKENS,
            )
            # One upload writes the numbers of all slots, so they are rows of one tensor.
            names = (*_NUMBERS, *_PENALTIES)
            self._numbers = torch.zeros((len(names), slots), dtype=torch.int32, device=device)
            rows = dict(zip(names, self._numbers, strict=True))
            for name in _PENALTIES:
                rows[name] = rows[name].view(torch.float32)
            tables = {one.name: getattr(made, one.name) for one in fields(RuleState) if one.name not in rows}
            self.state = RuleState(**rows, **tables)
        self._host = np.zeros((len(names), slots), dtype=np.int32)
        self._host_rows: dict[str, npt.NDArray[np.int32] | npt.NDArray[np.float32]] = dict(
            zip(names, self._host, strict=True)
        )
        for name in _PENALTIES:
            self._host_rows[name] = self._host_rows[name].view(np.float32)
        for slot in range(slots):
            self._set_neutral(slot)
        self._numbers.copy_(torch.from_numpy(self._host.copy()))
        self._owners: list[tuple[int, int] | None] = [None] * slots
        self._stale = False

    def hold(self, sequence: Sequence) -> None:
        """Write the rules of a sequence that owns a slot, unless they are written already.

        Call `flush` afterwards to upload the numbers of the rules, such as penalties. The host must have read
        all tokens of the sequence.
        """
        slot, owner = sequence.slot, (sequence.session_id, sequence.residence)
        if not sequence.ruled:
            if self._owners[slot] is not None:
                self._owners[slot] = None
                self._set_neutral(slot)
                self._stale = True
            return
        if self._owners[slot] == owner:
            return
        self._owners[slot] = owner
        self._set_neutral(slot)
        rules, host = sequence.request.sampling.rules, self._host_rows
        top = sequence.request.logprobs.top
        host["tops"][slot] = -1 if top is None else top
        if not rules.neutral:
            host["active"][slot] = 1
            host["presence"][slot] = rules.presence_penalty
            host["frequency"][slot] = rules.frequency_penalty
            host["repetition"][slot] = rules.repetition_penalty
            host["starts"][slot] = sequence.prompt_len
            # `min_tokens` counts the token that ends the text. The sum must fit an int32.
            host["first_ends"][slot] = min(sequence.prompt_len + rules.min_tokens, _LAST)
            self._write_words(sequence)
            self._write_biases(sequence)
            self._write_phrases(sequence)
            self._write_tail(sequence)
        self._stale = True

    def flush(self) -> None:
        """Upload the numbers that `hold` has changed, in stream order."""
        if self._stale:
            self._stale = False
            source = upload(self._host.reshape(-1), torch.int32, self._device)
            self._numbers.copy_(source.view(self._numbers.shape), non_blocking=True)

    def prompt_rows(self, sequences: list[Sequence]) -> RuleRows:
        """Return the rules of the first token after each prompt. `hold` must have written all rules."""
        count, device = len(sequences), self._device
        slots = [
            one.slot if one.ruled and not one.request.sampling.rules.neutral else -1 for one in sequences
        ]
        found = [_completed(one) if slot >= 0 else [] for one, slot in zip(sequences, slots, strict=True)]
        width = max(1, *[len(one) for one in found])
        banned = np.full((count, width), -1, dtype=np.int32)
        for row, tokens in enumerate(found):
            banned[row, : len(tokens)] = tokens
        zeros = torch.zeros(count, dtype=torch.int32, device=device)
        return RuleRows(
            self.state,
            slots=upload(slots, torch.int32, device),
            depths=zeros,
            paths=zeros[:, None],
            num_banned=upload([len(one) for one in found], torch.int32, device),
            banned=upload(banned.reshape(-1), torch.int32, device).view(count, width),
        )

    def count_first(self, sequences: list[Sequence], tokens: torch.Tensor) -> None:
        """Add the first token after each prompt to the token counts of the penalties, in stream order.

        Args:
            sequences: Sequences with slots. Their tokens on the host do not include `tokens` yet.
            tokens: ``[n] int64``, the first token of each sequence. A negative token is not counted.
        """
        if not any(one.ruled for one in sequences):
            return
        count, device = len(sequences), self._device
        slots = upload([one.slot if one.ruled else -1 for one in sequences], torch.int32, device)
        roots = upload([one.committed_len - 1 for one in sequences], torch.int32, device)
        zeros = torch.zeros(count, dtype=torch.int32, device=device)
        packed = torch.stack([zeros, zeros + 1, zeros, tokens.to(torch.int32)], dim=1)
        starts = torch.arange(count + 1, dtype=torch.int32, device=device)
        record_outputs(self.state, starts, slots, roots, packed, count)

    def _set_neutral(self, slot: int) -> None:
        self._host[:, slot] = 0
        self._host_rows["repetition"][slot] = 1.0
        self._host_rows["tops"][slot] = -1

    def _write_words(self, sequence: Sequence) -> None:
        """Write the flags of all tokens, and the counts of the output so far."""
        rules = sequence.request.sampling.rules
        if rules.allowed_token_ids is None:
            words = np.zeros(self._vocab_size, dtype=np.int32)
        else:
            words = np.full(self._vocab_size, FORBIDDEN, dtype=np.int32)
            words[list(rules.allowed_token_ids)] = 0
        if rules.repetition_penalty != 1:
            words[sequence.tokens[: sequence.prompt_len]] |= IN_PROMPT
        np.add.at(words, sequence.tokens[sequence.prompt_len :], 1)
        words[[token for token in sequence.stop_ids if token < self._vocab_size]] |= ENDS
        words[[word[0] for word in rules.bad_words if len(word) == 1]] |= FORBIDDEN
        self.state.words[sequence.slot].copy_(upload(words, torch.int32, self._device), non_blocking=True)

    def _write_biases(self, sequence: Sequence) -> None:
        biases = sorted(sequence.request.sampling.rules.logit_bias)
        self._host_rows["num_biases"][sequence.slot] = len(biases)
        if not biases:
            return
        tokens = np.full(self.state.bias_tokens.shape[1], _LAST, dtype=np.int32)
        tokens[: len(biases)] = [token for token, _ in biases]
        values = upload([value for _, value in biases], torch.float32, self._device)
        self.state.bias_tokens[sequence.slot].copy_(upload(tokens, torch.int32, self._device))
        self.state.bias_values[sequence.slot, : len(biases)].copy_(values)

    def _write_phrases(self, sequence: Sequence) -> None:
        phrases = _phrases(sequence)
        self._host_rows["num_phrases"][sequence.slot] = len(phrases)
        if not phrases:
            return
        bounds = np.cumsum([0, *[len(phrase) for phrase in phrases]])
        tokens = [token for phrase in phrases for token in phrase]
        self.state.phrase_starts[sequence.slot, : len(bounds)].copy_(
            upload(bounds, torch.int32, self._device)
        )
        self.state.phrase_tokens[sequence.slot, : len(tokens)].copy_(
            upload(tokens, torch.int32, self._device)
        )

    def _write_tail(self, sequence: Sequence) -> None:
        """Write the newest output tokens of a sequence that was retracted and is resumed."""
        if sequence.committed_len == sequence.prompt_len or not _phrases(sequence):
            return
        tail = np.zeros(TAIL, dtype=np.int32)
        for index in range(max(sequence.prompt_len, sequence.committed_len - TAIL), sequence.committed_len):
            tail[index % TAIL] = sequence.tokens[index]
        self.state.tail[sequence.slot].copy_(upload(tail, torch.int32, self._device))


def _phrases(sequence: Sequence) -> list[tuple[int, ...]]:
    """Return the bad words that consist of several tokens. A bad word of one token is a flag of that
    token."""
    return [word for word in sequence.request.sampling.rules.bad_words if len(word) > 1]


def _completed(sequence: Sequence) -> list[int]:
    """Return the tokens that would complete a bad word of several tokens at the sequence's end."""
    output = sequence.tokens[sequence.prompt_len :][-TAIL:]
    return [
        word[-1]
        for word in _phrases(sequence)
        if len(output) >= len(word) - 1 and tuple(output[len(output) - len(word) + 1 :]) == word[:-1]
    ]
