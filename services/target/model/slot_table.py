"""State of all slots on the device: lengths, last tokens, features, sampling parameters and page tables.

A sequence owns a slot from its admission until it ends or is retracted. The tensors never move, so recorded
CUDA graphs may refer to them. The host writes parameters and pages in stream order, after the rounds that are
in flight. These rounds therefore still read the old values. The host can give a slot or a page to another
sequence without waiting for the rounds in flight.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from outrider.kernels.packed_round import SlotState
from outrider.kernels.verify import SamplingTensors
from outrider.services.target.model.slot_rules import SlotRules
from outrider.services.target.scheduling.sequence import Sequence
from outrider.shared.kv.pool import KVPool
from outrider.shared.kv.upload import upload
from outrider.shared.spec.seeds import signed_seed

_WORDS = 8
"""int32 words of a slot's parameters: two for the seed, and one each for the six others."""


class SlotTable:
    """The slots of one engine. Engine thread only.

    Args:
        slots: Number of slots.
        columns: R, the largest number of tokens that a round may choose for a slot.
        pool: The KV pool. The page table contains indices of its pages.
        pages: Number of columns of the page table.
        vocab_size: Size of the vocabulary.

    Attributes:
        rules: Penalties, biases, forbidden tokens and wanted logprobs of the slots.
        state: The state of the slots between two rounds.
        features: ``[slots, R, feature_size]``, the feature rows of the tokens of the last round.
        sampling: The sampling parameters of each slot.
        page_table: ``[slots, pages] int32``.
    """

    def __init__(self, slots: int, columns: int, pool: KVPool, pages: int, vocab_size: int) -> None:
        self._pool = pool
        self.rules = SlotRules(slots, vocab_size, pool.device)
        self.columns = columns
        device = pool.device
        with torch.inference_mode(False):
            self._parameters = torch.zeros(_WORDS * slots, dtype=torch.int32, device=device)
            self.page_table = torch.zeros((slots, pages), dtype=torch.int32, device=device)
            self.state = SlotState(
                committed_lens=torch.ones(slots, dtype=torch.int32, device=device),
                limits=self._parameters[2 * slots : 3 * slots],
                tokens=torch.zeros((slots, columns), dtype=torch.int32, device=device),
                counts=torch.zeros(slots, dtype=torch.int32, device=device),
            )
        self._host = np.zeros(_WORDS * slots, dtype=np.int32)
        self._host_columns: dict[str, npt.NDArray[Any]] = {
            "seeds": self._host[: 2 * slots].view(np.int64),
            "limits": self._host[2 * slots : 3 * slots],
            "temperature": self._host[3 * slots : 4 * slots].view(np.float32),
            "top_k": self._host[4 * slots : 5 * slots],
            "top_p": self._host[5 * slots : 6 * slots].view(np.float32),
            "min_p": self._host[6 * slots : 7 * slots].view(np.float32),
            "choices": self._host[7 * slots :],
        }
        parts = self._parameters.split_with_sizes([2 * slots, *[slots] * 6])
        self.sampling = SamplingTensors(
            temperature=parts[2].view(torch.float32),
            top_k=parts[3],
            top_p=parts[4].view(torch.float32),
            min_p=parts[5].view(torch.float32),
            seeds=parts[0].view(torch.int64),
            choices=parts[6],
            all_greedy=False,
            any_filter=True,
        )
        # The owner of each slot (session and residence), and the number of its pages in the device's table.
        self._owners: list[tuple[int, int]] = [(-1, 0)] * slots
        self._num_written = [0] * slots
        self._stale = False
        # Pages to upload, by slot. A slot whose owner changes before the upload must not be written twice,
        # because `index_copy_` with repeated indices has no defined order on a GPU.
        self._new_pages: dict[int, list[int]] = {}
        self.resize_features()

    @property
    def slots(self) -> int:
        """Number of slots."""
        return self.state.counts.shape[0]

    def resize_features(self) -> None:
        """Allocate the features again after the pool's feature size has changed."""
        with torch.inference_mode(False):
            self.features = torch.zeros(
                (self.slots, self.columns, self._pool.feature_size),
                dtype=self._pool.dtype,
                device=self._pool.device,
            )

    def hold(self, sequence: Sequence) -> None:
        """Note the parameters and the new pages of a sequence with a slot. `flush` uploads them."""
        slot = sequence.slot
        owner = sequence.session_id, sequence.residence
        if self._owners[slot] != owner:
            self._set_parameters(sequence)
            self.rules.hold(sequence)
            self._owners[slot], self._num_written[slot] = owner, 0
            self._new_pages.pop(slot, None)
        assert sequence.lease is not None, "a sequence with a slot has a lease"
        pages = sequence.lease.pages
        if len(pages) > self._num_written[slot]:
            self._new_pages[slot] = list(pages[self._num_written[slot] :])

    def flush(self) -> None:
        """Upload everything that `hold` has noted, in stream order."""
        device = self._pool.device
        self.rules.flush()
        if self._stale:
            self._parameters.copy_(upload(self._host, torch.int32, device), non_blocking=True)
            self._stale = False
        if self._new_pages:
            width = self.page_table.shape[1]
            places: list[int] = []
            pages: list[int] = []
            for slot, new in self._new_pages.items():
                first = slot * width + self._num_written[slot]
                places.extend(range(first, first + len(new)))
                pages.extend(new)
                self._num_written[slot] += len(new)
            self._new_pages.clear()
            self.page_table.view(-1).index_copy_(
                0, upload(places, torch.int64, device), upload(pages, torch.int32, device)
            )

    def seat(self, sequences: Seq[Sequence], tokens: torch.Tensor) -> None:
        """Write, in stream order, the slot state of sequences whose first token has just been chosen.

        The feature row of each prompt's last token is copied from the KV pool, where it must be stored
        already.

        Args:
            sequences: Sequences with slots. Their tokens on the host do not include `tokens` yet.
            tokens: ``[n] int64``, the first token of each sequence after its prompt. A negative token stands
                for invalid logits and makes the slot idle.
        """
        if not sequences:
            return
        device = self._pool.device
        slots = upload([one.slot for one in sequences], torch.int64, device)
        lengths = upload([one.committed_len + 1 for one in sequences], torch.int32, device)
        self.state.committed_lens.index_copy_(0, slots, lengths)
        self.state.tokens[:, 0].index_copy_(0, slots, tokens.clamp(min=0).to(torch.int32))
        self.state.counts.index_copy_(0, slots, (tokens >= 0).to(torch.int32))
        self.rules.count_first(list(sequences), tokens)
        fed = [one for one in sequences if one.has_features]
        if fed and self._pool.feature_size:
            last = [self._last_row(one) for one in fed]
            rows = self._pool.feature_rows(upload(last, torch.int64, device))
            self.features[:, 0].index_copy_(0, upload([one.slot for one in fed], torch.int64, device), rows)

    def _last_row(self, sequence: Sequence) -> int:
        """Return the slot of the KV pool that stores the last token of a prompt."""
        assert sequence.lease is not None, "a sequence with a slot has a lease"
        return self._pool.token_slots(sequence.lease, sequence.cached_len - 1, sequence.cached_len)[0]

    def _set_parameters(self, sequence: Sequence) -> None:
        host, slot, params = self._host_columns, sequence.slot, sequence.request.sampling
        host["seeds"][slot] = signed_seed(params.seed)
        host["limits"][slot] = sequence.end_len
        host["temperature"][slot] = params.temperature
        host["top_k"][slot] = params.top_k
        host["top_p"][slot] = params.top_p
        host["min_p"][slot] = params.min_p
        host["choices"][slot] = params.choice_index
        self._stale = True
