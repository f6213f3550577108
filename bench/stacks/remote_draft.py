"""Starts a draft in its own process with `outrider serve draft`, beside the engine that is measured."""

from __future__ import annotations

import tempfile
from collections import deque
from contextlib import ExitStack
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import torch

from outrider.services.stack.launch import free_port, outrider_command
from outrider.services.stack.option_checks import DEVICE
from outrider.services.stack.supervisor import ChildSpec, Supervisor, Surroundings
from outrider.shared.base.errors import ConfigurationError

DRAIN_S = 10.0


class DraftTransport(Enum):
    """Transport between the target and the draft."""

    INPROC = "inproc"
    IPC = "ipc"
    GRPC = "grpc"
    UNIX = "unix"


@dataclass(frozen=True, slots=True)
class RemoteDraft:
    """Options of a draft that a benchmark starts in its own process.

    Attributes:
        head: Folder of the head.
        transport: Transport between target and draft. ``INPROC`` is not allowed.
        device, dtype: Device and dtype of the draft, in the service's notation.
        kv_tokens, max_sessions: Size of the draft's KV cache in tokens, and largest number of its sessions.
    """

    head: Path
    transport: DraftTransport
    device: str
    dtype: str
    kv_tokens: int
    max_sessions: int

    def start(self, cleanup: ExitStack, around: Surroundings, log: deque[str]) -> str:
        """Start the draft process, and return the address to which the target connects.

        Args:
            cleanup: Exit stack that stops the process when the stack is closed.
            around: Environment variables of the process, and functions to call when it starts or ends.
            log: Queue that receives the lines that the process prints.
        """
        runtime = Path(cleanup.enter_context(tempfile.TemporaryDirectory(prefix="outrider-")))
        port = free_port()
        listen, address = {
            DraftTransport.GRPC: (f"127.0.0.1:{port}", f"grpc://127.0.0.1:{port}"),
            DraftTransport.UNIX: (f"unix:{runtime / 'draft.sock'}", f"unix:{runtime / 'draft.sock'}"),
            DraftTransport.IPC: (f"ipc://{runtime / 'draft.ipc'}", f"ipc://{runtime / 'draft.ipc'}"),
        }[self.transport]
        flags = {
            "listen": listen,
            "draft": self.head,
            "device": self.device,
            "dtype": self.dtype,
            "kv-tokens": self.kv_tokens,
            "max-sessions": self.max_sessions,
            "log-level": "warning",
        }
        command = (
            outrider_command(),
            "serve",
            "draft",
            *(part for name, value in flags.items() for part in (f"--{name}", str(value))),
        )
        supervisor = Supervisor(
            (ChildSpec("draft", command, DRAIN_S),), lambda _name, line: log.append(line), around
        )
        cleanup.enter_context(supervisor).settle()
        return address


def check_draft_device(device: str) -> None:
    """Check that the draft can use this device, before the process of the draft starts.

    Raises:
        ConfigurationError: This machine has no such device.
    """
    gpus = torch.cuda.device_count()
    if DEVICE.fullmatch(device) is None or (
        device.startswith("cuda") and int(device.partition(":")[2] or 0) >= gpus
    ):
        raise ConfigurationError(
            f"--draft-device {device}: expected auto, cpu, or cuda:N for one of this machine's {gpus} GPUs.",
            field="--draft-device",
        )
