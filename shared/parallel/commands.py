"""What rank 0 tells the other ranks, call by call, on the control channel. Tensors do not pass here: they are broadcast behind the call.

A command is one byte of kind and its fields as 64-bit integers. Every rank runs the commands in order, so that all make the same
collective operations.
"""

from __future__ import annotations

import struct
from dataclasses import astuple, dataclass, fields

from outrider.shared.base.errors import ProtocolError


@dataclass(frozen=True, slots=True)
class MakePool:
    """Make the rank's part of the K/V pool, and acknowledge."""

    num_pages: int
    page_size: int


@dataclass(frozen=True, slots=True)
class Forward:
    """Take part in a forward pass; the step's inputs follow as one broadcast (`packing`).

    Attributes:
        rows, bs, max_pages: Shapes of tokens and page table.
        mask_words: Words of the ancestor masks; 0: causal rows.
        wide_tokens, wide_positions: Whether they are int64, not int32.
        max_query_len, max_kv_len: As in `AttentionBatch`.
    """

    rows: int
    bs: int
    max_pages: int
    mask_words: int
    wide_tokens: int
    wide_positions: int
    max_query_len: int
    max_kv_len: int


@dataclass(frozen=True, slots=True)
class Logits:
    """Compute this rank's columns of the logits and give them to rank 0.

    Attributes:
        rows: Of hidden states that follow by broadcast; 0: all rows of the last forward pass, which every rank has.
        best_only: Give each row's best value and id instead of all columns.
    """

    rows: int
    best_only: int


@dataclass(frozen=True, slots=True)
class Compact:
    """Move accepted rows in the pool; path and counts follow by broadcast, with page table and lengths where `max_pages` is not 0.

    Without them they are those of the last forward pass.
    """

    bs: int
    width: int
    max_pages: int


@dataclass(frozen=True, slots=True)
class Scrub:
    """Zero pages, whose numbers follow by broadcast."""

    num_pages: int


@dataclass(frozen=True, slots=True)
class Record:
    """Capture the commands up to `Recorded` into CUDA graph `graph` instead of running them."""

    graph: int


@dataclass(frozen=True, slots=True)
class Recorded:
    """The capture is complete."""

    graph: int


@dataclass(frozen=True, slots=True)
class Replay:
    """Launch a captured graph."""

    graph: int


@dataclass(frozen=True, slots=True)
class Drop:
    """Drop a captured graph."""

    graph: int


@dataclass(frozen=True, slots=True)
class Forget:
    """Drop all captured graphs."""


@dataclass(frozen=True, slots=True)
class Stop:
    """Leave; nothing follows."""


Command = MakePool | Forward | Logits | Compact | Scrub | Record | Recorded | Replay | Drop | Forget | Stop

_KINDS: tuple[type[Command], ...] = (
    MakePool,
    Forward,
    Logits,
    Compact,
    Scrub,
    Record,
    Recorded,
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
    """Return the command of these bytes.

    Raises:
        ProtocolError: They are none.
    """
    if not body or body[0] >= len(_KINDS) or len(body) != 1 + _LAYOUTS[_KINDS[body[0]]].size:
        raise ProtocolError(
            f"tensor parallel control: {len(body)} bytes that are no command; do all ranks run one version?",
            field="tp",
        )
    kind = _KINDS[body[0]]
    return kind(*_LAYOUTS[kind].unpack(body[1:]))
