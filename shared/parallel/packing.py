"""Packs a step's inputs into one buffer, so that one broadcast replaces eight."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from outrider.shared.attn.base import AttentionBatch
from outrider.shared.parallel.commands import Forward

TensorPart = tuple[tuple[int, ...], torch.dtype]


@dataclass(frozen=True, slots=True)
class StepInputs:
    """The inputs of one forward pass, apart from weights and K/V.

    Attributes:
        tokens, positions: ``[rows]``, int32 or int64.
        batch: The attention batch of these rows.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    batch: AttentionBatch

    def command(self) -> Forward:
        """Return the command that announces the buffer and describes its layout."""
        batch = self.batch
        tables, max_pages = batch.page_table.shape
        return Forward(
            rows=self.tokens.shape[0],
            bs=batch.kv_lens.shape[0],
            max_pages=max_pages,
            mask_words=0 if batch.ancestors is None else batch.ancestors.shape[1],
            wide_tokens=int(self.tokens.dtype is torch.int64),
            wide_positions=int(self.positions.dtype is torch.int64),
            max_query_len=batch.max_query_len,
            max_kv_len=batch.max_kv_len,
            tables=0 if batch.table_rows is None else tables,
            ragged=int(batch.ragged),
            one_chunk=int(batch.host_lens is not None and len(batch.host_lens) == 1),
        )

    def pack(self) -> torch.Tensor:
        """Return the inputs as one int32 vector. The inputs are copied once, on the device."""
        batch = self.batch
        lengths = [batch.page_table, batch.prefix_lens, batch.kv_lens, batch.query_start]
        more = [tensor for tensor in (batch.ancestors, batch.table_rows) if tensor is not None]
        return pack(_wide_first([batch.slots, self.tokens, self.positions]) + lengths + more)

    @classmethod
    def unpack(cls, buffer: torch.Tensor, command: Forward) -> StepInputs:
        """Return the inputs of a forward pass as views of a received buffer with `packed_words` words.

        Only a batch with a single sequence gets `AttentionBatch.host_lens`. In all other batches, this rank
        may therefore use another attention kernel than rank 0. This is harmless, because each rank computes
        different heads.
        """
        parts = iter(unpack(buffer, _layout(command)))
        named = {name: next(parts) for name in _order(command)}
        return cls(
            tokens=named["tokens"],
            positions=named["positions"],
            batch=AttentionBatch(
                page_table=named["page_table"],
                prefix_lens=named["prefix_lens"],
                kv_lens=named["kv_lens"],
                query_start=named["query_start"],
                ancestors=named.get("ancestors"),
                slots=named["slots"],
                max_query_len=command.max_query_len,
                max_kv_len=command.max_kv_len,
                table_rows=named.get("table_rows"),
                ragged=bool(command.ragged),
                host_lens=((command.max_kv_len - command.max_query_len, command.max_query_len),)
                if command.one_chunk
                else None,
            ),
        )


def packed_words(command: Forward) -> int:
    """Return the number of int32 words in the buffer of a forward pass."""
    return words_of(_layout(command))


def words_of(layout: Sequence[TensorPart]) -> int:
    """Return the number of int32 words that tensors of these shapes and dtypes take."""
    return sum(torch.Size(shape).numel() * (dtype.itemsize // 4) for shape, dtype in layout)


def pack(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return int32 and int64 tensors as one int32 vector. Pass int64 tensors first to align them."""
    return torch.cat([tensor.contiguous().view(-1).view(torch.int32) for tensor in tensors])


def unpack(buffer: torch.Tensor, layout: Sequence[TensorPart]) -> list[torch.Tensor]:
    """Return views of the tensors in a packed vector."""
    parts, position = [], 0
    for shape, dtype in layout:
        words = torch.Size(shape).numel() * (dtype.itemsize // 4)
        parts.append(buffer[position : position + words].view(dtype).view(shape))
        position += words
    return parts


def _wide_first(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return sorted(tensors, key=lambda tensor: -tensor.dtype.itemsize)


def _order(command: Forward) -> list[str]:
    wide = {"slots": 1, "tokens": command.wide_tokens, "positions": command.wide_positions}
    names = [
        *sorted(wide, key=lambda name: -wide[name]),
        "page_table",
        "prefix_lens",
        "kv_lens",
        "query_start",
    ]
    if command.mask_words:
        names.append("ancestors")
    if command.tables:
        names.append("table_rows")
    return names


def _layout(command: Forward) -> list[TensorPart]:
    rows, bs = command.rows, command.bs
    int32, int64 = torch.int32, torch.int64
    parts: dict[str, TensorPart] = {
        "slots": ((rows,), int64),
        "tokens": ((rows,), int64 if command.wide_tokens else int32),
        "positions": ((rows,), int64 if command.wide_positions else int32),
        "page_table": ((command.tables or bs, command.max_pages), int32),
        "prefix_lens": ((bs,), int32),
        "kv_lens": ((bs,), int32),
        "query_start": ((bs + 1,), int32),
        "ancestors": ((rows, command.mask_words), int32),
        "table_rows": ((bs,), int32),
    }
    return [parts[name] for name in _order(command)]
