"""Runs a draft in its own process for tests that step the target's engine. It can send corrupt trees.

All of these processes are forked from one server process, which imports torch and the draft's code only once.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import random
import signal
import sys
from pathlib import Path
from typing import Any

import torch

from outrider.services.draft import app
from outrider.services.draft.settings import DraftSettings
from outrider.shared.rpc.blob_staging import BlobStaging
from outrider.shared.rpc.ipc.blob_mailbox import HostMailbox
from outrider.shared.rpc.ipc.cuda_blob_mailbox import StreamMailbox
from support.suite.compute_device import DEVICE

START = multiprocessing.get_context("forkserver")
START.set_forkserver_preload(["support.drafts.draft_process"])
STOP_S = 20.0


class DraftProcess:
    """A draft service on a unix socket.

    Args:
        folder: Folder for the draft's socket and log.
        scheme: Scheme of the draft's address: ``ipc://``, or ``unix:`` for gRPC.
        target, head: Folders of the checkpoints.
        spoils: Whether the draft corrupts some of the trees that it sends for rounds on the device.
    """

    def __init__(self, folder: Path, scheme: str, target: Path, head: Path, *, spoils: bool = False) -> None:
        self.address = f"{scheme}{folder}/draft.sock"
        values = {
            "draft": str(head),
            "target_weights": str(target),
            "listen": self.address,
            "device": str(DEVICE),
            "dtype": "float32",
            "threads": 1,
            "kv_tokens": 8192,
        }
        self._log = folder / "draft.log"
        self._process = START.Process(target=_serve, args=(values, spoils, self._log), daemon=True)
        self._process.start()

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal to the process."""
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    def output(self) -> str:
        """Return the output of the process so far."""
        return self._log.read_text() if self._log.exists() else ""

    def kill(self) -> None:
        """Kill the process. A stopped process handles no other signal."""
        self._process.kill()

    def wait(self) -> None:
        """Wait until the process has ended."""
        self._process.join()

    def stop(self) -> int:
        """Terminate the process, or kill it after 20 s, and return its exit code."""
        self._process.terminate()
        self._process.join(STOP_S)
        if self._process.exitcode is None:
            self._process.kill()
            self._process.join()
        assert self._process.exitcode is not None
        return self._process.exitcode


def _serve(values: dict[str, Any], spoils: bool, log: Path) -> None:
    """Run the draft. This function runs in the new process."""
    os.setsid()
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(descriptor, stream.fileno())
    if spoils:
        _corrupt_trees(str(values["device"]))
    # On a CPU too, the receiving threads only enqueue messages, as they do on a GPU.
    app.DraftProtocol = functools.partial(app.DraftProtocol, only_enqueues=True)  # type: ignore[misc]
    app.run(DraftSettings.load(values))


def _corrupt_trees(device: str) -> None:
    rng = random.Random(7)
    last: dict[str, torch.Tensor] = {}

    def corrupt(owner: type, name: str) -> None:
        true_send = getattr(owner, name)

        def send(self: object, *arguments: Any) -> Any:
            at = [isinstance(argument, torch.Tensor) for argument in arguments].index(True)
            before, blob, after = arguments[:at], arguments[at], arguments[at + 1 :]
            kind = rng.choice(["noise", "near", "stale", "true"])
            last.setdefault("blob", blob.clone())
            if kind == "noise":  # arbitrary bytes
                blob[256:].view(torch.int32).random_(-(1 << 31), (1 << 31) - 1)
            elif kind == "near":  # small numbers, some of which are valid trees
                blob[256:].view(torch.int32).random_(-1, 12)
            elif kind == "stale":  # the trees of an earlier round
                blob = last["blob"]
            return true_send(self, *before, blob, *after)

        setattr(owner, name, send)

    # Load these kernels now. The first launch waits for the device, which would deadlock while the device
    # itself waits for a state.
    blob = torch.zeros(64, dtype=torch.uint8, device=device).clone()
    blob.view(torch.int32).random_(-(1 << 31), (1 << 31) - 1)
    blob.view(torch.int32).random_(-1, 12)
    corrupt(HostMailbox, "send")
    corrupt(StreamMailbox, "send")
    corrupt(BlobStaging, "fetch")
