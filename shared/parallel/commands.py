"""The commands that rank 0 sends to the other ranks on the control channel.

Commands contain no tensors. If a command needs tensors, rank 0 broadcasts them right after the command.

A command is encoded as one byte for its kind, followed by its fields as 64-bit integers. Every rank runs the
commands in order, so all ranks make the same collective calls.
"""

from __future__ import annotations

import struct
from dataclasses import astuple, dataclass, fields

from outrider.shared.base.errors import ProtocolError


@dataclass(frozen=True, slots=True)
class MakePool:
    """Create the rank's part of the K/V pool, and report to rank 0 when the part exists."""

    num_pages: int
    page_size: int


@dataclass(frozen=True, slots=True)
class Forward:
    """Command to take part in a forward pass. The inputs of the pass follow as one broadcast.

    Attributes:
        rows, bs, max_pages: Number of tokens (rows), number of sequences, and width of the page table.
        mask_words: Number of words in each row's ancestor mask. 0 means that the rows are causal.
        wide_tokens, wide_positions: 1 if the tokens (or positions) are int64, 0 if they are int32.
        max_query_len, max_kv_len: The attributes of `AttentionBatch` with the same names.
        tables: Number of rows of the page table if the batch has `AttentionBatch.table_rows`. The broadcast
            then contains `table_rows` too. 0 if the batch has no `table_rows`.
        ragged: 1 if the batch is ragged (see `AttentionBatch.ragged`).
        one_chunk: 1 if the batch has a single sequence whose lengths are known on the host. The sequence then
            has exactly `max_query_len` rows, and its last row is the token with index ``max_kv_len - 1``.
    """

    rows: int
    bs: int
    max_pages: int
    mask_words: int
    wide_tokens: int
    wide_positions: int
    max_query_len: int
    max_kv_len: int
    tables: int = 0
    ragged: int = 0
    one_chunk: int = 0


@dataclass(frozen=True, slots=True)
class Logits:
    """Command to compute a rank's columns of the logits and send these columns to rank 0.

    Attributes:
        rows: Number of rows of hidden states that rank 0 broadcasts after the command. With 0, the ranks use
            all rows of the last forward pass.
        best_only: 1 to send only each row's highest logit and its token id. 0 to send all columns.
    """

    rows: int
    best_only: int


@dataclass(frozen=True, slots=True)
class Compact:
    """Command to move the K/V of accepted tree nodes to committed KV slots, in each rank's KV pool.

    The accepted paths and their lengths follow by broadcast.

    Attributes:
        bs, width: Shape of the tensor of paths.
        tables, max_pages: Shape of the page table, which is broadcast together with the cached lengths. If
            `tables` is 0, the ranks use the page table and the cached lengths of the last forward pass.
        has_table_rows: 1 if the tensor `table_rows` is broadcast. For each sequence, it contains the index of
            the sequence's row in the page table. 0 if sequence b uses row b.
    """

    bs: int
    width: int
    tables: int
    max_pages: int
    has_table_rows: int


@dataclass(frozen=True, slots=True)
class Scrub:
    """Zero pages. The page numbers follow by broadcast."""

    num_pages: int


@dataclass(frozen=True, slots=True)
class Record:
    """Capture the commands up to `GraphRecorded` into CUDA graph number `graph` without running them."""

    graph: int


@dataclass(frozen=True, slots=True)
class GraphRecorded:
    """End the capture of graph number `graph`."""

    graph: int


@dataclass(frozen=True, slots=True)
class Replay:
    """Launch graph number `graph`."""

    graph: int


@dataclass(frozen=True, slots=True)
class Drop:
    """Drop graph number `graph`."""

    graph: int


@dataclass(frozen=True, slots=True)
class Forget:
    """Drop all captured graphs."""


@dataclass(frozen=True, slots=True)
class Stop:
    """Stop serving. No command follows."""


Command = (
    MakePool | Forward | Logits | Compact | Scrub | Record | GraphRecorded | Replay | Drop | Forget | Stop
)

_KINDS: tuple[type[Command], ...] = (
    MakePool,
    Forward,
    Logits,
    Compact,
    Scrub,
    Record,
    GraphRecorded,
    Replay,
    Drop,
    Forget,
    Stop,
)
_CODES = {kind: code for code, kind in enumerate(_KINDS)}
_LAYOUTS = {kind: struct.Struct(f"<{len(fields(kind))}q") for kind in _KINDS}


def encode(command: Command) -> bytes:
    """Return the bytes of a command."""
    kind = type(command)
    return bytes((_CODES[kind],)) + _LAYOUTS[kind].pack(*astuple(command))


def decode(body: bytes) -> Command:
    """Decode a command.

    Raises:
        ProtocolError: The bytes are not a command.
    """
    if not body or body[0] >= len(_KINDS) or len(body) != 1 + _LAYOUTS[_KINDS[body[0]]].size:
        raise ProtocolError(
            f"tensor parallel control: {len(body)} bytes are not a command; "
            "run the same version on all ranks",
            field="tp",
        )
    kind = _KINDS[body[0]]
    return kind(*_LAYOUTS[kind].unpack(body[1:]))
