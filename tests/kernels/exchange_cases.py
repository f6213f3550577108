"""Checks of exchange_add, shared by interpreted tests on a CPU and compiled tests on a GPU.

All ranks are in the test process and run one after the other.
"""

from __future__ import annotations

import functools

import torch
from guards import Guards, reference_version, triton_version
from layer_cases import EPS, Maker, same_stream

from outrider.kernels.add_norm import add_sums
from outrider.kernels.exchange_add import ABSENT, Boxes, exchange_add, inbox_shape
from outrider.kernels.exchange_add.reference import send
from outrider.kernels.stream import ResidualStream

ABSENT_NUMBER = torch.tensor(ABSENT, dtype=torch.int32).view(torch.float32).item()


def added(part: torch.Tensor) -> torch.Tensor:
    """Return the sum of a product's splits in the kernel's order, which keeps -0 + -0 = -0."""
    return functools.reduce(torch.add, part) if part.dim() == 3 else part


class Ranks:
    """Boxes of all ranks in one process.

    A rank runs alone: its inbox is filled with the data of the others beforehand, and its own data is sent to
    separate outboxes.
    """

    def __init__(self, device: str, ranks: int, width: int) -> None:
        self.inboxes = [
            torch.empty(inbox_shape(ranks, width), dtype=torch.int32, device=device) for _ in range(ranks)
        ]
        self.outboxes = [torch.empty_like(inbox) for inbox in self.inboxes]
        self.boxes = []
        for rank in range(ranks):
            self.boxes.append(
                Boxes.of(
                    rank, [self.inboxes[i] if i == rank else self.outboxes[i] for i in range(ranks)], 100
                )
            )

    def deliver(self, parts: list[torch.Tensor], rank: int) -> None:
        """Put the data of the other ranks into a rank's inbox, and clear the outboxes."""
        for outbox in self.outboxes:
            outbox.fill_(ABSENT)
        for peer, part in enumerate(parts):
            if peer != rank:
                boxes = self.boxes[rank]
                seen = Boxes(
                    peer, (self.inboxes[rank].cpu(),), boxes.addresses, boxes.slots.cpu(), boxes.lost, 1
                )
                send(added(part).cpu(), seen)
                self.inboxes[rank].copy_(seen.inboxes[0])

    def sent(self, rank: int) -> list[torch.Tensor]:
        """Return the data that a rank sent to the other ranks."""
        return [outbox.cpu() for peer, outbox in enumerate(self.outboxes) if peer != rank]


def check_exchange(
    device: str,
    dtype: torch.dtype,
    ranks: int,
    calls: list[tuple[int, int]],
    width: int,
    guards: Guards,
    *,
    bias: bool,
) -> None:
    """Check calls of (rows, splits): all ranks get the bits of a single rank that adds the parts.

    Afterwards all inboxes must be empty.
    """
    group, make = Ranks(device, ranks, width), Maker(device, dtype, guards)
    for rows, splits in calls:
        shape = (rows, width) if splits == 0 else (splits, rows, width)
        parts = [make(*shape, dtype=torch.float32 if splits else dtype) for _ in range(ranks)]
        parts[0][..., 0] = -0.0
        parts[0].flatten()[-1] = ABSENT_NUMBER
        residual, norm = make(rows, width + 8)[:, :width], make(width, shift=1.0)
        constant = make(width) if bias else None
        with reference_version():
            want = add_sums(
                torch.stack([added(part).float() for part in parts]), residual, norm, EPS, bias=constant
            )
        found: list[ResidualStream] = []
        for rank in range(ranks):
            group.deliver(parts, rank)
            with triton_version(guards):
                found.append(exchange_add(parts[rank], residual, norm, EPS, group.boxes[rank], bias=constant))
            _check_boxes(group, parts, rank)
        for stream in found:
            same_stream(stream, want, dtype)
            for one, other in zip(
                (stream.residual, stream.scaled, stream.sums),
                (found[0].residual, found[0].scaled, found[0].sums),
                strict=True,
            ):
                assert one is not None
                assert other is not None
                assert torch.equal(one, other), "all ranks must have the same bits"


def _check_boxes(group: Ranks, parts: list[torch.Tensor], rank: int) -> None:
    """Check that the rank's inbox is empty, and that it sent the same data as the reference."""
    boxes = group.boxes[rank]
    assert bool((group.inboxes[rank] == ABSENT).all()), "the inbox is not empty"
    want = Boxes(
        rank,
        (torch.full_like(group.inboxes[0], ABSENT, device="cpu"),),
        boxes.addresses,
        1 - boxes.slots.cpu(),
        boxes.lost,
        1,
    )
    send(added(parts[rank]).cpu(), want)
    for sent in group.sent(rank):
        assert torch.equal(sent, want.inboxes[0])
    assert boxes.lost.item() == 0


def check_lost_rank(device: str, guards: Guards) -> None:
    """Check that only the first call waits for a rank that sends nothing, and that its rows are NaN."""
    make = Maker(device, torch.float32, guards)
    group = Ranks(device, 2, 40)
    boxes = group.boxes[0]
    parts, residual, norm = make(2, 40), make(2, 40), make(40)
    for _call in range(2):
        with triton_version(guards):
            stream = exchange_add(parts, residual, norm, EPS, boxes)
        assert bool(stream.residual.isnan().all())
        assert bool(stream.scaled.isnan().all())
        assert boxes.lost.item() == 1
