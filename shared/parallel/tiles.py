"""Copies rank 0's choice of GEMM tiles to every rank, because the tiles determine how results are rounded."""

from __future__ import annotations

import json
from collections.abc import Sequence

import torch

from outrider.kernels.skinny_gemm.kept import Tried
from outrider.kernels.skinny_gemm.table import device_name, remember
from outrider.shared.parallel.collectives import Collectives

_WORD = 4


def spread_tiles(collectives: Collectives, tried: Sequence[Tried], device: torch.device) -> list[Tried]:
    """Use rank 0's choice of GEMM tiles on every rank. Waits for the device.

    Every rank must call this function at the same point.

    Args:
        collectives: Collectives over all ranks.
        tried: On rank 0, the tiles that were chosen in trials. The values of other ranks are ignored.
        device: This rank's device.

    Returns:
        Rank 0's tiles.
    """
    body = json.dumps([entry.to_json() for entry in tried]).encode() if collectives.rank == 0 else b""
    length = torch.tensor([len(body)], dtype=torch.int32, device=device)
    collectives.broadcast(length)
    size = int(length)
    words = torch.zeros(-(-size // _WORD), dtype=torch.int32, device=device)
    if collectives.rank == 0:
        words.copy_(torch.frombuffer(bytearray(body.ljust(len(words) * _WORD)), dtype=torch.int32))
    collectives.broadcast(words)
    received = [Tried.from_json(entry) for entry in json.loads(words.cpu().numpy().tobytes()[:size])]
    remember(device_name(device), ((entry.product, entry.tile) for entry in received))
    return received
