"""Which carrier reaches a draft's address."""

from __future__ import annotations

from collections.abc import Callable

import torch

from outrider.services.target.draft_client.transport.carrier import Carrier
from outrider.services.target.draft_client.transport.grpc_carrier import GrpcCarrier
from outrider.services.target.draft_client.transport.ipc_carrier import IpcCarrier
from outrider.shared.rpc.address import IpcAddress


def carrier_of(address: str, device: torch.device, rounds: bool = False) -> Callable[[], Carrier]:
    """Return what makes carriers to a draft's address; `rounds`: such as keep rounds on the device."""
    ipc = IpcAddress.parse(address, "draft")

    def make() -> Carrier:
        return (
            GrpcCarrier(address, rounds=rounds, device=device)
            if ipc is None
            else IpcCarrier(ipc, device, rounds=rounds)
        )

    return make
