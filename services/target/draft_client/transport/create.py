"""Selects the transport for a draft's address: sockets and mailboxes for ``ipc://``, gRPC for all others."""

from __future__ import annotations

from collections.abc import Callable

import torch

from outrider.services.target.draft_client.transport.carrier import Carrier
from outrider.services.target.draft_client.transport.grpc_carrier import GrpcCarrier
from outrider.services.target.draft_client.transport.ipc_carrier import IpcCarrier
from outrider.shared.rpc.address import IpcAddress


def carrier_of(address: str, device: torch.device, on_device: bool = False) -> Callable[[], Carrier]:
    """Return a function that makes the transport (`Carrier`) of each new connection to a draft service.

    Args:
        address: The draft service's address.
        device: The target's device.
        on_device: True to offer rounds whose states and trees stay on the devices.
    """
    ipc = IpcAddress.parse(address, "draft")

    def make() -> Carrier:
        return (
            GrpcCarrier(address, on_device=on_device, device=device)
            if ipc is None
            else IpcCarrier(ipc, device, on_device=on_device)
        )

    return make
