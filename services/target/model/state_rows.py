"""Fills the rows of a round's state: idle rows with their sampling parameters, and rows of another batch."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch

from outrider.kernels.verify_round import RoundTensors
from outrider.services.target.model.input_batch import InputBatch
from outrider.shared.kv.upload import upload
from outrider.shared.spec.resident import RoundState


def round_tensors(state: RoundState) -> RoundTensors:
    return RoundTensors(state.committed_lens, state.tokens, state.counts)


def load_state(state: RoundState, tables: InputBatch) -> None:
    """Make every row idle and copy the sequences' parameters from the tables."""
    state.counts.zero_()
    state.tokens.zero_()
    state.committed_lens.copy_(tables.committed_lens)
    rows = tables.first_rows
    state.temperature.copy_(rows.temperature)
    state.seeds.copy_(rows.seeds)
    state.choices.copy_(rows.choices)


def take_rows(state: RoundState, source: RoundState, rows: Seq[int]) -> None:
    """Copy `rows` of one state to the first rows of another state."""
    index = upload(rows, torch.int64, state.counts.device)
    for mine, theirs in (
        (state.committed_lens, source.committed_lens),
        (state.counts, source.counts),
        (state.tokens, source.tokens),
        (state.features, source.features),
    ):
        mine[: len(rows)].copy_(theirs.index_select(0, index))
